//! The engine core's outside: inputs in, outputs out, and what becomes of a request that is submitted or given up.
//!
//! Inputs change state at once; what follows from it (which requests get a place, which tokens are computed next) is
//! decided when the driver polls, so that inputs that arrive together are decided together.
//!
//! The core neither runs steps nor moves bytes, and it has no clock: time is what `handle` was last told.

use crate::api::{
    EngineConfig, ExportEnd, FinishReason, Finished, Input, Output, Owner, Reject, Step, Submit, Transfer,
};
use crate::cache::Cache;
use crate::load::{Load, Totals};
use crate::queue::Queue;
use crate::residents::{Resident, ResidentLimits, Residents};
use crate::sequence::{Phase, Sequence};
use crate::slots::Slots;
use crate::transfers::Held;
use homing_kv::{BlockHash, BlockId};
use homing_units::{Instant, RequestId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The engine core.
///
/// Call [`Engine::handle`] with one or more inputs, then [`Engine::poll_output`] until it is `None`, then
/// [`Engine::poll_timeout`], and hand [`Input::Timeout`] in at that instant if nothing else comes first.
///
/// A request waits, runs, and ends; one that imports pulls its KV before it runs. Requests are served in order of
/// arrival. When a request in a step needs a block and none is to be had, the last-arrived running request loses its
/// blocks and waits again; a request never takes blocks from one that came before it, so the oldest always goes on and
/// every request ends.
#[derive(Debug)]
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) now: Instant,
    pub(crate) cache: Cache,
    pub(crate) slots: Slots,
    /// Every request that has not ended, and those that ended in the outstanding step. Bounded by `max_waiting` and twice
    /// `max_running`.
    pub(crate) sequences: BTreeMap<RequestId, Sequence>,
    /// Requests that wait for a place.
    pub(crate) waiting: Queue,
    /// Requests that wait for blocks to pull KV into.
    pub(crate) offered: Queue,
    /// By arrival. Together with `importing` and `reloading` at most `max_running`.
    pub(crate) running: BTreeMap<u64, RequestId>,
    pub(crate) importing: BTreeSet<RequestId>,
    /// Requests that wait for KV from host memory.
    pub(crate) reloading: BTreeSet<RequestId>,
    /// Orders to copy from host memory that the driver has not answered, with what the host keeps for them. Bounded as
    /// `fenced` is.
    pub(crate) reloads: BTreeMap<RequestId, Vec<BlockHash>>,
    /// Ended requests whose KV is held for a puller. Each holds a block, so there are at most `kv_blocks`.
    pub(crate) exports: BTreeMap<RequestId, Held>,
    /// Blocks of imports and reloads that were given up and that the driver may still write into, bounded likewise.
    pub(crate) fenced: BTreeMap<RequestId, Vec<BlockId>>,
    /// Ends of leases and of imports.
    pub(crate) deadlines: BTreeSet<(Instant, RequestId)>,
    pub(crate) outstanding: Option<Step>,
    pub(crate) outputs: VecDeque<Output>,
    pub(crate) load: Load,
    pub(crate) totals: Totals,
    pub(crate) next_arrival: u64,
    pub(crate) next_step: u64,
    /// Whose KV is cached; `None` where nobody asks.
    pub(crate) residents: Option<Residents>,
}

impl Engine {
    /// An idle engine with an empty cache.
    ///
    /// # Panics
    /// If `block_size`, `max_batch_tokens` or `max_running` is 0.
    #[must_use]
    pub fn new(config: EngineConfig) -> Self {
        assert!(config.block_size > 0, "a block holds at least one token");
        assert!(config.max_batch_tokens > 0, "a step computes at least one token");
        assert!(config.max_running > 0, "at least one request runs");
        Self {
            cache: Cache::new(&config),
            slots: Slots::new(config.kind),
            config,
            now: Instant::ZERO,
            sequences: BTreeMap::new(),
            waiting: Queue::default(),
            offered: Queue::default(),
            running: BTreeMap::new(),
            importing: BTreeSet::new(),
            reloading: BTreeSet::new(),
            reloads: BTreeMap::new(),
            exports: BTreeMap::new(),
            fenced: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            outstanding: None,
            outputs: VecDeque::new(),
            load: Load::default(),
            totals: Totals::default(),
            next_arrival: 0,
            next_step: 0,
            residents: None,
        }
    }

    /// Remembers the sessions of requests that say whose they are from now on, for [`Self::residents`].
    pub fn remember_sessions(&mut self, limits: ResidentLimits) {
        self.residents = Some(Residents::new(limits));
    }

    /// What is cached of each remembered session, the one that had a request last first; of none that has a request here now. Costs a
    /// bisection for each of them.
    #[must_use]
    pub fn residents(&self) -> Vec<Resident> {
        let residents = self.residents.as_ref();
        residents.map_or_else(Vec::new, |residents| residents.look(&self.cache))
    }

    /// Another number each time that [`Self::residents`] may say something else than before, apart from what KV events say.
    #[must_use]
    pub fn residents_version(&self) -> u64 {
        self.residents.as_ref().map_or(0, Residents::version)
    }

    /// Takes one input in. `now` never goes back; an earlier one counts as the latest seen.
    pub fn handle(&mut self, now: Instant, input: Input) {
        self.now = self.now.max(now);
        self.cache.advance(self.now);
        match input {
            Input::Submit(submit) => self.submit(submit),
            Input::Abort(id) => self.abort(id),
            Input::StepDone(sampled) => self.step_done(&sampled),
            Input::ImportDone { id, outcome } => self.import_done(id, outcome),
            Input::ExportAck(id) => self.end_export(id, ExportEnd::Acked),
            Input::RenewExport(id) => self.renew_export(id),
            Input::ReleaseExported(id) => self.release_exported(id),
            Input::ReloadDone(id) => self.reload_done(id),
            Input::Timeout => {}
            Input::ClearCache => self.clear_cache(),
        }
        self.expire();
    }

    /// The next output, or `None` when there is nothing to do until the next input.
    pub fn poll_output(&mut self) -> Option<Output> {
        if self.outputs.is_empty() {
            self.plan();
        }
        self.outputs.pop_front()
    }

    /// When to hand in [`Input::Timeout`] at the latest: the first end of a lease or of an import.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// The blocks that hold a request's tokens, in order: of every item of the outstanding step until that step is done,
    /// and of an export until it ends. Empty for a request that holds none. Read it for every step: between steps a block may
    /// be exchanged for an equal one that was cached first.
    #[must_use]
    pub fn block_table(&self, id: RequestId) -> &[BlockId] {
        let running = self.sequences.get(&id).map(|sequence| sequence.table.as_slice());
        let held = || self.exports.get(&id).map(|held| held.blocks.as_slice());
        running.or_else(held).unwrap_or_default()
    }

    /// How many of these blocks of a prompt, from the first on, are cached here now. `hashes` is a chain, as
    /// [`homing_kv::hash_blocks`] makes it.
    #[must_use]
    pub fn cached_prefix(&self, hashes: &[BlockHash]) -> usize {
        self.cache.pool().match_prefix(hashes)
    }

    /// Blocks that are cached under a name, in use or not.
    #[must_use]
    pub fn cached_blocks(&self) -> u32 {
        self.cache.pool().cached()
    }

    fn submit(&mut self, submit: Submit) {
        let id = submit.id;
        if let Err(reason) = self.check(&submit) {
            self.outputs.push_back(Output::Rejected { id, reason });
            return;
        }
        self.cache.arrives(submit.owner);
        if let (Some(residents), Some(owner)) = (&mut self.residents, submit.owner) {
            residents.arrives(owner.session);
        }
        let mut sequence = Sequence::new(submit, self.next_arrival);
        self.next_arrival += 1;
        if let Some(reason) = self.enter_slot(&mut sequence) {
            self.outputs.push_back(Output::Crashed { id, reason });
        }
        let queue = match sequence.transfer {
            Transfer::None | Transfer::Export => &mut self.waiting,
            Transfer::Import { .. } => &mut self.offered,
        };
        queue.insert(&sequence, self.config.block_size);
        self.load.add(Load::of(&sequence));
        self.sequences.insert(id, sequence);
    }

    fn check(&self, submit: &Submit) -> Result<(), Reject> {
        let prompt = &submit.prompt;
        let known = self.sequences.contains_key(&submit.id)
            || self.exports.contains_key(&submit.id)
            || self.fenced.contains_key(&submit.id)
            || self.reloads.contains_key(&submit.id);
        let hashed = prompt.blocks.len() == (prompt.tokens / self.config.block_size) as usize;
        let offer_fits = match submit.transfer {
            Transfer::None | Transfer::Export => true,
            Transfer::Import { tokens } => tokens <= prompt.tokens,
        };
        if known || !hashed || !offer_fits || prompt.tokens == 0 || submit.max_output_tokens == 0 {
            return Err(Reject::Invalid);
        }
        let tokens = u64::from(prompt.tokens) + u64::from(submit.max_output_tokens);
        if tokens > u64::from(self.config.max_context_tokens) {
            return Err(Reject::ContextTooLong);
        }
        // The last token is sampled and never computed.
        if (tokens - 1).div_ceil(u64::from(self.config.block_size)) > u64::from(self.config.kv_blocks) {
            return Err(Reject::PoolTooSmall);
        }
        if self.refuses_correction(submit) {
            return Err(Reject::Invalid);
        }
        if self.waiting.len() + self.offered.len() >= self.config.max_waiting {
            return Err(Reject::QueueFull);
        }
        Ok(())
    }

    fn abort(&mut self, id: RequestId) {
        let Some(phase) = self.sequences.get(&id).map(|sequence| sequence.phase) else {
            self.end_export(id, ExportEnd::Aborted);
            return;
        };
        match phase {
            Phase::Waiting | Phase::Offered | Phase::Running => self.end(id, FinishReason::Aborted),
            Phase::Importing { .. } | Phase::Reloading { .. } => self.give_up_fetch(id, FinishReason::Aborted),
            Phase::Ended => {}
        }
    }

    fn clear_cache(&mut self) {
        self.drop_idle_slots();
        self.cache.clear(&mut self.outputs);
    }

    /// Ends a request that no KV is on its way for. Its blocks go at once, or with the step that uses them.
    pub(crate) fn end(&mut self, id: RequestId, reason: FinishReason) {
        self.leave_phase(id);
        let in_step = self.in_outstanding_step(id);
        self.update(id, |sequence| {
            sequence.phase = Phase::Ended;
            sequence.answered = matches!(reason, FinishReason::Stop | FinishReason::Length);
        });
        let usage = self.sequences[&id].usage;
        self.outputs.push_back(Output::Finished(Finished { id, reason, usage }));
        if !in_step {
            self.remove(id);
        }
    }

    /// Takes a request out of the list of its phase.
    pub(crate) fn leave_phase(&mut self, id: RequestId) {
        let sequence = &self.sequences[&id];
        match sequence.phase {
            Phase::Waiting => self.waiting.remove(sequence, self.config.block_size),
            Phase::Offered => self.offered.remove(sequence, self.config.block_size),
            Phase::Importing { deadline, .. } => {
                self.importing.remove(&id);
                self.deadlines.remove(&(deadline, id));
            }
            Phase::Reloading { .. } => {
                self.reloading.remove(&id);
            }
            Phase::Running => {
                self.running.remove(&sequence.arrival);
            }
            Phase::Ended => {}
        }
        self.unblock();
    }

    /// Forgets an ended request and gives its blocks back.
    pub(crate) fn remove(&mut self, id: RequestId) {
        let mut sequence = self.sequences.remove(&id).expect("only a known request is removed");
        assert_eq!(sequence.phase, Phase::Ended, "only an ended request is removed");
        self.leave_slot(&mut sequence);
        let blocks = sequence.drop_kv();
        self.release(&blocks, sequence.owner);
        self.cache.leaves(&sequence, self.config.block_size);
        if let (Some(residents), Some(owner)) = (&mut self.residents, sequence.owner) {
            let context = sequence.reusable_hashes(self.config.block_size);
            residents.leaves(owner.session, &context, sequence.prompt.blocks.len());
        }
    }

    /// Gives back what a request with this owner used.
    pub(crate) fn release(&mut self, blocks: &[BlockId], owner: Option<Owner>) {
        self.cache.release(blocks, owner);
        if self.slots.are_used() {
            // Slots alone hold KV between requests.
            self.cache.drop_unused(&mut self.outputs);
        }
        self.unblock();
    }

    /// Something changed that may make room for those who wait.
    pub(crate) fn unblock(&mut self) {
        self.waiting.blocked = false;
        self.offered.blocked = false;
    }

    /// Changes a request and keeps the load up to date.
    pub(crate) fn update<R>(&mut self, id: RequestId, change: impl FnOnce(&mut Sequence) -> R) -> R {
        let sequence = self.sequences.get_mut(&id).expect("only a known request changes");
        self.load.subtract(Load::of(sequence));
        let result = change(sequence);
        self.load.add(Load::of(sequence));
        result
    }

    fn in_outstanding_step(&self, id: RequestId) -> bool {
        let items = self.outstanding.as_ref().map(|step| &step.items);
        items.is_some_and(|items| items.iter().any(|item| item.id == id))
    }
}
