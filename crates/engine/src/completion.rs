//! What a step gave: KV that is computed now, blocks that have a name now, tokens, and requests that end.
//!
//! A request whose sample is missing from the answer counts as not run and is planned again; a driver that cannot run it
//! gives it up. Answers for others, and further answers for one request, are ignored: they are a peer's data.

use crate::api::{FinishReason, Output, Sampled, StepItem, Transfer};
use crate::engine::Engine;
use crate::load::Load;
use crate::sequence::Phase;
use homing_units::RequestId;
use std::collections::BTreeMap;

/// The answers to a step, to be taken in the step's order. As long as they stand in that order nothing is searched.
struct Answers<'a> {
    rest: &'a [Sampled],
    /// The first answer for each request, once the order was broken.
    by_request: Option<BTreeMap<RequestId, Sampled>>,
}

impl Answers<'_> {
    fn take(&mut self, id: RequestId) -> Option<Sampled> {
        if self.by_request.is_none()
            && let Some((next, rest)) = self.rest.split_first()
            && next.id == id
        {
            self.rest = rest;
            return Some(*next);
        }
        let rest = self.rest;
        let by_request = self.by_request.get_or_insert_with(|| {
            let mut first = BTreeMap::new();
            for answer in rest {
                first.entry(answer.id).or_insert(*answer);
            }
            first
        });
        by_request.remove(&id)
    }
}

impl Engine {
    /// The outstanding step was run. Without one there is nothing to do.
    pub(crate) fn step_done(&mut self, sampled: &[Sampled]) {
        let Some(step) = self.outstanding.take() else { return };
        let mut answers = Answers {
            rest: sampled,
            by_request: None,
        };
        for item in &step.items {
            if self.sequences[&item.id].phase == Phase::Ended {
                self.remove(item.id);
                continue;
            }
            let answer = if item.sample { answers.take(item.id) } else { None };
            if answer.is_some() || !item.sample {
                self.advance(item, answer);
            }
        }
    }

    /// KV of an item's tokens exists now: counts them, names the blocks that they completed, and takes the next token in.
    fn advance(&mut self, item: &StepItem, answer: Option<Sampled>) {
        let block_size = self.config.block_size;
        let sequence = self.sequences.get_mut(&item.id).expect("a request in a step is known");
        assert_eq!(
            sequence.computed, item.start,
            "a step computes the first pending tokens"
        );
        self.load.subtract(Load::of(sequence));
        sequence.computed += item.count;
        let of_prompt = sequence.computed.min(sequence.prompt.tokens);
        let first_time = of_prompt.saturating_sub(sequence.counted);
        sequence.counted += first_time;
        self.totals.computed_tokens += u64::from(first_time);
        self.cache.commit(sequence, block_size, &mut self.outputs);
        if let Some(answer) = answer {
            sequence.append(answer.filled, block_size);
            self.totals.output_tokens += 1;
        }
        self.load.add(Load::of(sequence));
        let length_reached = sequence.usage.output_tokens >= sequence.max_output_tokens;
        match answer {
            Some(answer) if answer.stop => self.answered(item.id, FinishReason::Stop),
            Some(_) if length_reached => self.answered(item.id, FinishReason::Length),
            Some(_) | None => {}
        }
    }

    pub(crate) fn commit(&mut self, id: RequestId) {
        let sequence = self
            .sequences
            .get_mut(&id)
            .expect("a request whose KV has arrived is known");
        self.cache.commit(sequence, self.config.block_size, &mut self.outputs);
    }

    fn answered(&mut self, id: RequestId, reason: FinishReason) {
        if self.sequences[&id].transfer == Transfer::Export {
            let export = self.hold(id);
            self.outputs.push_back(Output::Exported(export));
        }
        self.end(id, reason);
    }
}
