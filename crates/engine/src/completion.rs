//! What a step gave: KV that is computed now, blocks that have a name now, tokens, and requests that end.
//!
//! A request whose sample is missing from the answer counts as not run and is planned again; a driver that cannot run it
//! gives it up. Answers for others, and further answers for one request, are ignored: they are a peer's data.

use crate::api::{FinishReason, Output, Sampled, StepItem, Transfer};
use crate::engine::Engine;
use crate::sequence::Phase;
use homing_units::RequestId;
use std::collections::BTreeMap;

impl Engine {
    /// The outstanding step was run. Without one there is nothing to do.
    pub(crate) fn step_done(&mut self, sampled: &[Sampled]) {
        let Some(step) = self.outstanding.take() else { return };
        let mut answers = BTreeMap::new();
        for answer in sampled {
            answers.entry(answer.id).or_insert(*answer);
        }
        for item in step.items {
            if self.sequences[&item.id].phase == Phase::Ended {
                self.remove(item.id);
            } else if !item.sample {
                self.computed(&item);
            } else if let Some(answer) = answers.remove(&item.id) {
                self.computed(&item);
                self.sampled(answer);
            }
        }
    }

    /// KV of an item's tokens exists now: count them and name the blocks that they completed.
    fn computed(&mut self, item: &StepItem) {
        let first_time = self.update(item.id, |sequence| {
            assert_eq!(
                sequence.computed, item.start,
                "a step computes the first pending tokens"
            );
            sequence.computed += item.count;
            let of_prompt = sequence.computed.min(sequence.prompt.tokens);
            let first_time = of_prompt.saturating_sub(sequence.counted);
            sequence.counted += first_time;
            first_time
        });
        self.totals.computed_tokens += u64::from(first_time);
        self.commit(item.id);
    }

    pub(crate) fn commit(&mut self, id: RequestId) {
        let sequence = self.sequences.get_mut(&id).expect("a request in a step is known");
        self.cache.commit(sequence, self.config.block_size, &mut self.outputs);
    }

    fn sampled(&mut self, answer: Sampled) {
        let block_size = self.config.block_size;
        let length_reached = self.update(answer.id, |sequence| {
            sequence.append(answer.filled, block_size);
            sequence.usage.output_tokens >= sequence.max_output_tokens
        });
        self.totals.output_tokens += 1;
        let reason = if answer.stop {
            FinishReason::Stop
        } else if length_reached {
            FinishReason::Length
        } else {
            return;
        };
        if self.sequences[&answer.id].transfer == Transfer::Export {
            let export = self.hold(answer.id);
            self.outputs.push_back(Output::Exported(export));
        }
        self.end(answer.id, reason);
    }
}
