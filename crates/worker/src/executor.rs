//! The engine core coupled with a backend: requests with real tokens in, tokens, text and KV events out.
//!
//! No I/O, no clock, no thread: the engine thread drives it live, tests drive several of them in memory. It keeps what
//! the core must not see (tokens, text, samplers, stop rules) and what guards a transfer (which blocks may be read for
//! an export or written for an import at this moment).
//!
//! Order of calls: inputs, then [`Executor::poll`] until `None`; where [`Executor::step_ready`], then
//! [`Executor::run_step`], wait as long as it says (inputs may come meanwhile), [`Executor::complete_step`], poll again.
//! [`Executor::poll_timeout`] names the latest moment for [`Executor::timeout`].

pub use crate::effect::{Effect, Ended, KvOut, Outcome, PullOrder, StopCause, TokenOut};

use crate::backend::{Backend, BackendError, Choice, Chosen, Item};
use crate::request::{Request, RequestState, Source};
use crate::transfers::{ExportView, Transfers};
use homing_engine::Engine;
use homing_engine::api::{
    EngineConfig, Export, FinishReason, Finished, Import, ImportError, Input, KvChange, Output, Sampled, Snapshot,
    Step, StepItem, Submit,
};
use homing_model::Tokenizer;
use homing_units::{Duration, Instant, RequestId};
use std::collections::{BTreeMap, VecDeque};

/// A step that was handed out and is not answered yet.
#[derive(Debug)]
struct Outstanding {
    step: Step,
    /// Its tokens, once it was run; `Err` when the backend failed.
    result: Option<Result<Vec<Chosen>, BackendError>>,
}

/// The engine core coupled with a backend.
pub struct Executor<B> {
    engine: Engine,
    backend: B,
    tokenizer: Tokenizer,
    block_size: u32,
    /// Live requests: bounded by the engine's running and waiting limits.
    requests: BTreeMap<RequestId, RequestState>,
    transfers: Transfers,
    outstanding: Option<Outstanding>,
    effects: VecDeque<Effect>,
    /// The time of the last input.
    now: Instant,
}

impl<B: Backend> Executor<B> {
    /// An idle executor with an empty cache.
    #[must_use]
    pub fn new(config: EngineConfig, backend: B, tokenizer: Tokenizer) -> Self {
        Self {
            block_size: config.block_size,
            engine: Engine::new(config),
            backend,
            tokenizer,
            requests: BTreeMap::new(),
            transfers: Transfers::default(),
            outstanding: None,
            effects: VecDeque::new(),
            now: Instant::ZERO,
        }
    }

    /// Takes a request in. What becomes of it is said by [`Effect::Rejected`] or [`Effect::Ended`].
    ///
    /// # Panics
    /// If the request's id is that of a live one.
    pub fn submit(&mut self, now: Instant, id: RequestId, request: Request) {
        let submit = Submit {
            id,
            prompt: request.prompt.clone(),
            max_output_tokens: request.max_output_tokens,
            transfer: request.transfer,
            session: None,
            owner: request.owner,
        };
        let before = self
            .requests
            .insert(id, RequestState::new(request, self.block_size, &self.tokenizer));
        assert!(before.is_none(), "request id `{id}` is in use");
        self.tell(now, Input::Submit(submit));
    }

    /// Gives a request up. Unknown ids are ignored.
    pub fn abort(&mut self, now: Instant, id: RequestId) {
        self.tell(now, Input::Abort(id));
    }

    /// Drops every block that no request uses.
    pub fn clear_cache(&mut self, now: Instant) {
        self.tell(now, Input::ClearCache);
    }

    /// Time has passed.
    pub fn timeout(&mut self, now: Instant) {
        self.tell(now, Input::Timeout);
    }

    fn tell(&mut self, now: Instant, input: Input) {
        self.now = self.now.max(now);
        self.engine.handle(now, input);
    }

    /// When [`Executor::timeout`] is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.engine.poll_timeout()
    }

    /// A copy of the engine's load.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.engine.snapshot()
    }

    /// The backend.
    #[must_use]
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Panics if the engine's state contradicts itself, or if it and the executor disagree on what is alive.
    pub fn check_invariants(&self) {
        self.engine.check_invariants();
        let snapshot = self.engine.snapshot();
        let alive = snapshot.running + snapshot.waiting + snapshot.importing;
        assert_eq!(
            self.requests.len(),
            alive as usize,
            "the executor and the engine know the same requests: {snapshot:?}"
        );
        assert_eq!(
            self.transfers.imports(),
            snapshot.importing as usize,
            "every import of the engine may be written"
        );
    }
}

/// Steps and what they give.
impl<B: Backend> Executor<B> {
    /// The next thing to tell.
    pub fn poll(&mut self) -> Option<Effect> {
        while self.effects.is_empty() {
            let output = self.engine.poll_output()?;
            self.digest(output);
        }
        self.effects.pop_front()
    }

    /// Whether a step waits to be run.
    #[must_use]
    pub fn step_ready(&self) -> bool {
        self.outstanding
            .as_ref()
            .is_some_and(|outstanding| outstanding.result.is_none())
    }

    /// Runs the step that waits and says how long it takes on top: call [`Executor::complete_step`] after that.
    ///
    /// # Errors
    /// When the backend failed. [`Executor::complete_step`] is due all the same: it ends the step's requests.
    ///
    /// # Panics
    /// If no step waits.
    pub fn run_step(&mut self) -> Result<Duration, String> {
        let mut outstanding = self.outstanding.take().expect("`run_step` is called when a step waits");
        // A request that was given up since the step was planned is not computed any more.
        outstanding
            .step
            .items
            .retain(|item| self.requests.contains_key(&item.id));
        let draws: Vec<f64> = outstanding
            .step
            .items
            .iter()
            .map(|item| self.draw(item.id, item.sample))
            .collect();
        let (engine, requests) = (&self.engine, &self.requests);
        let planned = outstanding.step.items.iter().zip(draws);
        let items: Vec<Item<'_>> = planned
            .map(|(item, draw)| item_of(engine, requests, item, draw))
            .collect();
        let result = self.backend.run(&outstanding.step, &items);
        let said = match &result {
            Ok(outcome) => Ok(outcome.wait),
            Err(error) => Err(error.to_string()),
        };
        outstanding.result = Some(result.map(|outcome| outcome.chosen));
        self.outstanding = Some(outstanding);
        said
    }
}

/// Steps and what they give, continued: the way back.
impl<B: Backend> Executor<B> {
    /// The step that was run has taken its time: hands its tokens to their requests and to the engine.
    ///
    /// # Panics
    /// If no step was run.
    pub fn complete_step(&mut self, now: Instant) {
        let outstanding = self
            .outstanding
            .take()
            .expect("`complete_step` is called after `run_step`");
        let result = outstanding.result.expect("`complete_step` is called after `run_step`");
        let sampling = outstanding
            .step
            .items
            .iter()
            .filter(|item| item.sample)
            .map(|item| item.id);
        let sampled = match result {
            Ok(chosen) => sampling
                .zip(chosen)
                .map(|(id, chosen)| self.accept(id, chosen))
                .collect(),
            Err(_) => {
                let ids: Vec<RequestId> = outstanding.step.items.iter().map(|item| item.id).collect();
                ids.into_iter().for_each(|id| self.fail(now, id));
                sampling
                    .map(|id| Sampled {
                        id,
                        stop: true,
                        filled: None,
                    })
                    .collect()
            }
        };
        self.tell(now, Input::StepDone(sampled));
    }

    fn accept(&mut self, id: RequestId, chosen: Chosen) -> Sampled {
        // A request that was given up while its step ran is gone; the engine ignores what it sampled.
        let Some(state) = self.requests.get_mut(&id) else {
            return Sampled {
                id,
                stop: false,
                filled: None,
            };
        };
        let (token, accepted) = state.accept(id, chosen.token, chosen.digest, &self.tokenizer);
        self.effects.push_back(Effect::Token(token));
        Sampled {
            id,
            stop: accepted.stop,
            filled: accepted.filled,
        }
    }

    fn fail(&mut self, now: Instant, id: RequestId) {
        if let Some(state) = self.requests.get_mut(&id) {
            state.backend_failed = true;
            self.tell(now, Input::Abort(id));
        }
    }

    fn draw(&mut self, id: RequestId, sample: bool) -> f64 {
        self.requests
            .get_mut(&id)
            .filter(|_| sample)
            .map_or(0.0, RequestState::draw)
    }
}

fn item_of<'a>(
    engine: &'a Engine,
    requests: &'a BTreeMap<RequestId, RequestState>,
    item: &StepItem,
    draw: f64,
) -> Item<'a> {
    let state = requests
        .get(&item.id)
        .expect("items of requests that are gone were left out");
    Item {
        sequence: &state.sequence,
        start: item.start as usize,
        count: item.count as usize,
        table: engine.block_table(item.id),
        tip: state.tip,
        choice: item.sample.then_some(Choice {
            sampling: &state.request.sampling,
            draw,
        }),
    }
}

/// What the engine says.
impl<B: Backend> Executor<B> {
    fn digest(&mut self, output: Output) {
        match output {
            Output::Step(step) => self.outstanding = Some(Outstanding { step, result: None }),
            Output::Import(import) => self.begin_import(import),
            Output::Exported(export) => self.exported(&export),
            Output::ExportEnded { id, reason } => {
                self.transfers.close_export(id);
                self.effects.push_back(Effect::ExportEnded { id, reason });
            }
            Output::Rejected { id, reason } => {
                self.requests.remove(&id);
                self.effects.push_back(Effect::Rejected { id, reason });
            }
            // Its tokens so far stay with its state: the engine asks for them again, as a prefill.
            Output::Preempted { .. } => {}
            Output::Finished(finished) => self.finished(finished),
            Output::Kv(event) => self.kv(event.change),
            // Not configured in a worker: it has neither host memory for KV nor session slots. A reload fails its request
            // instead of the process, and its answer frees the blocks.
            Output::Reload(reload) => self.refuse_reload(reload.id),
            Output::Trimmed(_) | Output::Crashed { .. } => {}
        }
    }

    /// The request fails as one whose KV could not be had.
    fn refuse_reload(&mut self, id: RequestId) {
        if let Some(state) = self.requests.get_mut(&id) {
            state.backend_failed = true;
        }
        self.tell(self.now, Input::Abort(id));
        self.tell(self.now, Input::ReloadDone(id));
    }

    fn begin_import(&mut self, import: Import) {
        let state = self
            .requests
            .get_mut(&import.id)
            .expect("the engine imports for live requests only");
        if import.blocks.is_empty() {
            // All that is of use is cached here; the request runs already.
            state.source = Source::Settled;
            self.effects.push_back(Effect::ReleaseSource { id: import.id });
            return;
        }
        self.transfers.open_import(&import, &state.request, self.block_size);
        let pulled_tokens = state
            .request
            .prompt
            .tokens
            .saturating_sub(import.first_block * self.block_size);
        self.effects.push_back(Effect::Pull(PullOrder {
            id: import.id,
            first_block: import.first_block,
            blocks: u32::try_from(import.blocks.len()).expect("a pool has fewer than 2^32 blocks"),
            tokens: pulled_tokens,
            deadline: import.deadline,
            wait: self.backend.transfer_wait(pulled_tokens),
        }));
    }

    fn exported(&mut self, export: &Export) {
        let state = self
            .requests
            .get_mut(&export.id)
            .expect("the engine exports live requests only");
        let view = ExportView {
            id: export.id,
            blocks: export.blocks.clone(),
            tokens: export.tokens,
            prompt_hash: state.request.prompt_hash,
            lease_ends: export.lease_ends,
        };
        self.transfers
            .open_export(view.clone(), &state.request, self.block_size);
        state.export = Some(view);
    }

    fn finished(&mut self, finished: Finished) {
        let id = finished.id;
        if self.transfers.close_import(id) {
            // Given up while its blocks were open for writing. Nothing writes into them any more: the engine may have them.
            self.tell(
                self.now,
                Input::ImportDone {
                    id,
                    outcome: Err(ImportError::TimedOut),
                },
            );
        }
        let mut state = self.requests.remove(&id).expect("a request ends once");
        let outcome = match finished.reason {
            FinishReason::Stop => Outcome::Stop(state.stopped_by.clone().unwrap_or(StopCause::EndOfSequence)),
            FinishReason::Length => Outcome::Length,
            FinishReason::Aborted if state.backend_failed => Outcome::BackendFailed,
            FinishReason::Aborted => Outcome::Aborted,
            FinishReason::ImportFailed(error) => Outcome::ImportFailed(error),
        };
        let ended_well = matches!(outcome, Outcome::Stop(_) | Outcome::Length);
        let text = if ended_well {
            state.rest_of_text()
        } else {
            String::new()
        };
        // After a failed import the same offer may be tried again; after everything else nobody will come for it.
        if state.source == Source::Offered && !matches!(outcome, Outcome::ImportFailed(_)) {
            self.effects.push_back(Effect::ReleaseSource { id });
        }
        let export = state.export.take();
        self.effects.push_back(Effect::Ended(Ended {
            id,
            outcome,
            text,
            usage: finished.usage,
            export,
        }));
    }

    fn kv(&mut self, change: KvChange) {
        let tokens = match &change {
            KvChange::Stored {
                request,
                first_block,
                hashes,
                ..
            } => {
                let state = self
                    .requests
                    .get(request)
                    .expect("blocks are stored by live requests only");
                let start = (*first_block * self.block_size) as usize;
                state.sequence[start..start + hashes.len() * self.block_size as usize].to_vec()
            }
            KvChange::Removed { .. } | KvChange::Cleared => Vec::new(),
        };
        self.effects.push_back(Effect::Kv(KvOut { change, tokens }));
    }
}

/// Transfers. Reads and writes are refused unless the blocks are under transfer at this moment.
impl<B: Backend> Executor<B> {
    /// The export of a request, while its blocks are held.
    #[must_use]
    pub fn export(&self, id: RequestId) -> Option<&ExportView> {
        self.transfers.export(id)
    }

    /// The payload of block `index` of an exported prompt; `None` when it is not held (any more).
    #[must_use]
    pub fn read_export(&self, id: RequestId, index: u32) -> Option<Vec<u8>> {
        Some(self.backend.read_block(&self.transfers.readable(id, index)?))
    }

    /// Stores block `index` of a prompt that is being pulled.
    ///
    /// # Errors
    /// `TimedOut` when the import was given up, `Corrupt` when the payload is not this block's.
    pub fn write_import(&mut self, id: RequestId, index: u32, payload: &[u8]) -> Result<(), ImportError> {
        let block = self.transfers.writable(id, index).ok_or(ImportError::TimedOut)?;
        self.backend
            .write_block(&block, payload)
            .map_err(|_| ImportError::Corrupt)
    }

    /// An import has ended. Ignored when it was given up before.
    pub fn import_done(&mut self, now: Instant, id: RequestId, outcome: Result<(), ImportError>) {
        self.transfers.close_import(id);
        if let (Some(state), Ok(())) = (self.requests.get_mut(&id), outcome) {
            state.source = Source::Settled;
        }
        self.tell(now, Input::ImportDone { id, outcome });
    }

    /// Whoever asked for an export still wants it pulled: until when it is held now; `None` where it is not held.
    pub fn renew_export(&mut self, now: Instant, id: RequestId) -> Option<Instant> {
        self.tell(now, Input::RenewExport(id));
        let lease_ends = self.engine.lease_ends(id)?;
        self.transfers.renew(id, lease_ends);
        Some(lease_ends)
    }

    /// The puller has what it wanted. Unknown ids are ignored.
    pub fn export_ack(&mut self, now: Instant, id: RequestId) {
        self.tell(now, Input::ExportAck(id));
    }
}

#[cfg(test)]
#[path = "executor_tests.rs"]
mod tests;
