//! A driver with a memory: it does what a worker does, on virtual time, and checks all that the engine tells it.
//!
//! Each slot of its KV memory holds a fingerprint of the tokens up to that position. Running a step reads the whole
//! context through the block table and writes the new positions, so a block that was freed too early, shared wrongly or
//! written behind a fence shows as a wrong fingerprint, as it would show as wrong text in a real worker.

use homing_engine::Engine;
use homing_engine::api::{
    EngineConfig, Export, FinishReason, Finished, Import, ImportError, Input, KvChange, KvEvent, Output, Owner, Reject,
    Reload, Sampled, Step, StepItem, Submit, Transfer,
};
use homing_kv::{BlockHash, BlockId, Prompt, Tier, hash_blocks};
use homing_units::{Duration, Instant, RequestId, SessionId};
use std::collections::{BTreeMap, BTreeSet};

/// More steps than any test's requests can need.
const MAX_STEPS: u32 = 2_000;
/// More outputs than one input can cause.
const MAX_OUTPUTS: u32 = 5_000;
/// How long every step takes.
pub const STEP: Duration = Duration::from_millis(10);

/// A request as the driver knows it.
pub struct Request {
    pub tokens: Vec<u32>,
    pub prompt: usize,
    pub max_output: u32,
    pub stop_after: u32,
    /// Prompt positions that steps computed.
    pub computed: BTreeSet<usize>,
    pub end: Option<Finished>,
    pub rejected: Option<Reject>,
}

pub struct Driver {
    pub engine: Engine,
    pub now: Instant,
    pub config: EngineConfig,
    pub requests: BTreeMap<RequestId, Request>,
    /// Orders to pull that were not answered.
    pub imports: BTreeMap<RequestId, Import>,
    /// Orders to copy from host memory that were not answered.
    pub reloads: BTreeMap<RequestId, Reload>,
    /// Every order to pull that was ever given, whether there was something to pull or not.
    pub ordered: Vec<Import>,
    pub exports: BTreeMap<RequestId, Export>,
    /// Everything but steps and KV events, as text.
    pub log: Vec<String>,
    pub steps: Vec<Step>,
    /// The cache as its events tell.
    pub cache: BTreeSet<BlockHash>,
    /// Host memory as its events tell.
    pub host: BTreeSet<BlockHash>,
    /// The session that the next requests are of.
    pub session: Option<SessionId>,
    /// Whose the next requests are.
    pub owner: Option<Owner>,
    pub events: Vec<KvEvent>,
    memory: Vec<Vec<u64>>,
    step: Option<Step>,
}

impl Driver {
    pub fn new(config: EngineConfig) -> Self {
        Self {
            engine: Engine::new(config.clone()),
            now: Instant::ZERO,
            requests: BTreeMap::new(),
            imports: BTreeMap::new(),
            reloads: BTreeMap::new(),
            ordered: Vec::new(),
            exports: BTreeMap::new(),
            log: Vec::new(),
            steps: Vec::new(),
            cache: BTreeSet::new(),
            host: BTreeSet::new(),
            session: None,
            owner: None,
            events: Vec::new(),
            memory: vec![vec![0; config.block_size as usize]; config.kv_blocks as usize],
            step: None,
            config,
        }
    }

    pub fn submit(&mut self, id: u64, tokens: &[u32], max_output_tokens: u32, transfer: Transfer) -> RequestId {
        self.submit_stopping(id, tokens, max_output_tokens, u32::MAX, transfer)
    }

    /// A request whose output ends by itself after so many tokens.
    pub fn submit_stopping(
        &mut self,
        id: u64,
        tokens: &[u32],
        max_output_tokens: u32,
        stop_after: u32,
        transfer: Transfer,
    ) -> RequestId {
        let id = RequestId(id);
        let request = Request {
            tokens: tokens.to_vec(),
            prompt: tokens.len(),
            max_output: max_output_tokens,
            stop_after,
            computed: BTreeSet::new(),
            end: None,
            rejected: None,
        };
        assert!(self.requests.insert(id, request).is_none(), "a test uses an id once");
        self.input(Input::Submit(Submit {
            id,
            prompt: Prompt::of_tokens(tokens, self.config.block_size),
            max_output_tokens,
            transfer,
            session: self.session,
            owner: self.owner,
        }));
        id
    }

    /// Hands one input in and takes all outputs.
    pub fn input(&mut self, input: Input) {
        self.engine.handle(self.now, input);
        self.engine.check_invariants();
        self.drain();
    }

    /// Runs the outstanding step. Whether there was one.
    pub fn run_step(&mut self) -> bool {
        self.run_step_without(|_| false)
    }

    /// Runs the outstanding step, but for those items, whose samples stay out of the answer.
    pub fn run_step_without(&mut self, left_out: impl Fn(RequestId) -> bool) -> bool {
        let Some(step) = self.step.take() else { return false };
        self.now += STEP;
        let run = step.items.iter().filter(|item| !(item.sample && left_out(item.id)));
        let sampled = run.filter_map(|item| self.run_item(item)).collect();
        self.input(Input::StepDone(sampled));
        true
    }

    /// Runs steps until there is none; imports stay unanswered and leases run.
    pub fn run(&mut self) {
        for _ in 0..MAX_STEPS {
            if !self.run_step() {
                return;
            }
        }
        panic!("still running after {MAX_STEPS} steps: {:?}", self.engine.snapshot());
    }

    pub fn advance_to_timeout(&mut self) {
        let at = self.engine.poll_timeout().expect("something has a deadline");
        self.now = self.now.max(at);
        self.input(Input::Timeout);
    }

    /// Answers an import: on success its KV lies in its blocks.
    pub fn finish_import(&mut self, id: RequestId, outcome: Result<(), ImportError>) {
        let import = self.imports.remove(&id).expect("the import was ordered");
        if outcome.is_ok() {
            self.write_import(&import);
        } else {
            // Half of what arrived was garbage.
            for block in &import.blocks {
                self.memory[block.0 as usize].fill(u64::MAX);
            }
        }
        self.input(Input::ImportDone { id, outcome });
    }

    /// Answers a reload: its KV lies in its blocks.
    pub fn finish_reload(&mut self, id: RequestId) {
        let reload = self.reloads.remove(&id).expect("the reload was ordered");
        for hash in &reload.hashes {
            assert!(self.host.contains(hash), "the host keeps what is being copied");
        }
        self.write_blocks(id, reload.first_block, &reload.blocks);
        self.input(Input::ReloadDone(id));
    }

    pub fn ack(&mut self, id: RequestId) {
        let export = self.exports.get(&id).expect("the export is held").clone();
        self.check_export(&export);
        self.input(Input::ExportAck(id));
        assert!(!self.exports.contains_key(&id), "an acknowledged export ends");
    }

    pub fn end(&self, id: RequestId) -> Finished {
        self.requests[&id].end.expect("the request has ended")
    }

    pub fn reason(&self, id: RequestId) -> FinishReason {
        self.end(id).reason
    }

    pub fn live(&self) -> impl Iterator<Item = RequestId> {
        let live = self
            .requests
            .iter()
            .filter(|(_, request)| request.end.is_none() && request.rejected.is_none());
        live.map(|(id, _)| *id)
    }

    pub fn step(&self) -> &Step {
        self.step.as_ref().expect("a step is outstanding")
    }

    pub fn has_step(&self) -> bool {
        self.step.is_some()
    }

    /// Nothing is held by anybody, and every request has ended.
    pub fn assert_idle(&self) {
        assert_eq!(self.live().collect::<Vec<_>>(), [], "every request has ended");
        assert!(self.step.is_none() && self.exports.is_empty());
        assert!(self.imports.is_empty() && self.reloads.is_empty());
        let snapshot = self.engine.snapshot();
        assert!(
            snapshot.slots > 0 || snapshot.blocks_free + snapshot.blocks_evictable == snapshot.blocks_total,
            "the pool is empty"
        );
        assert_eq!(snapshot.slots, snapshot.slots_idle, "nobody uses a slot");
        let work = (
            snapshot.running,
            snapshot.waiting,
            snapshot.importing,
            snapshot.exporting,
            snapshot.reloading,
        );
        assert_eq!(work, (0, 0, 0, 0, 0));
        assert_eq!(
            (snapshot.prefill_tokens_pending, snapshot.decode_context_tokens),
            (0, 0)
        );
        assert_eq!(self.engine.poll_timeout(), None);
    }

    fn drain(&mut self) {
        for _ in 0..MAX_OUTPUTS {
            let Some(output) = self.engine.poll_output() else {
                self.engine.check_invariants();
                self.assert_events_tell_the_cache();
                let overdue = self.engine.poll_timeout().is_some_and(|at| at <= self.now);
                assert!(!overdue, "what is due was done");
                return;
            };
            self.engine.check_invariants();
            self.take(output);
        }
        panic!("more than {MAX_OUTPUTS} outputs for one input: {:?}", self.log.last());
    }

    /// The cache that its events tell is the cache that there is.
    fn assert_events_tell_the_cache(&self) {
        assert_eq!(self.cache.len(), self.engine.cached_blocks() as usize);
        for hash in &self.cache {
            assert_eq!(self.engine.cached_prefix(&[*hash]), 1, "`{hash}` is cached");
        }
        let snapshot = self.engine.snapshot();
        assert_eq!(self.host.len(), snapshot.host_blocks_used as usize);
        assert!(snapshot.host_blocks_used <= snapshot.host_blocks_total);
    }

    fn take(&mut self, output: Output) {
        match output {
            Output::Step(step) => {
                assert!(self.step.is_none(), "at most one step is outstanding");
                self.steps.push(step.clone());
                self.step = Some(step);
            }
            Output::Kv(event) => self.take_event(event),
            Output::Import(import) => {
                self.log.push(format!(
                    "import {} {}+{}",
                    import.id,
                    import.first_block,
                    import.blocks.len()
                ));
                self.ordered.push(import.clone());
                if !import.blocks.is_empty() {
                    assert!(
                        self.imports.insert(import.id, import).is_none(),
                        "an import is ordered once"
                    );
                }
            }
            Output::Reload(reload) => {
                self.log.push(format!(
                    "reload {} {}+{}",
                    reload.id,
                    reload.first_block,
                    reload.blocks.len()
                ));
                self.check_reload(&reload);
                assert!(
                    self.reloads.insert(reload.id, reload).is_none(),
                    "one reload at a time for a request"
                );
            }
            Output::Exported(export) => {
                self.log.push(format!("exported {}", export.id));
                assert!(
                    self.requests[&export.id].end.is_none(),
                    "a request is exported before it ends"
                );
                self.check_export(&export);
                self.exports.insert(export.id, export);
            }
            Output::ExportEnded { id, reason } => {
                self.log.push(format!("export ended {id} {reason:?}"));
                let export = self.exports.remove(&id).expect("only a held export ends");
                self.check_export(&export);
            }
            Output::Rejected { id, reason } => {
                self.log.push(format!("rejected {id} {reason:?}"));
                let request = self.requests.get_mut(&id).expect("a submitted request is rejected");
                assert!(request.end.is_none() && request.rejected.is_none());
                request.rejected = Some(reason);
            }
            Output::Preempted { id } => self.log.push(format!("preempted {id}")),
            Output::Trimmed(trimmed) => self.log.push(format!("trimmed {} {}", trimmed.session, trimmed.blocks)),
            Output::Crashed { id, reason } => self.log.push(format!("crashed {id} {reason:?}")),
            Output::Finished(finished) => self.take_end(finished),
        }
    }

    fn take_end(&mut self, finished: Finished) {
        self.log.push(format!("finished {} {:?}", finished.id, finished.reason));
        let request = self.requests.get_mut(&finished.id).expect("a submitted request ends");
        assert!(
            request.end.is_none() && request.rejected.is_none(),
            "`{}` ends once",
            finished.id
        );
        let usage = finished.usage;
        assert_eq!(usage.prompt_tokens as usize, request.prompt);
        assert_eq!(
            usage.output_tokens as usize,
            request.tokens.len() - request.prompt,
            "`{}`: each sampled token counts once",
            finished.id
        );
        assert_sources_add_up(request, &finished);
        request.end = Some(finished);
    }

    fn take_event(&mut self, event: KvEvent) {
        assert_eq!(event.epoch, self.config.boot_epoch);
        assert_eq!(event.sequence, self.events.len() as u64, "events have no gaps");
        match &event.change {
            KvChange::Stored {
                request,
                first_block,
                parent,
                hashes,
                tier: Tier::Gpu,
            } => {
                let tokens = &self.requests[request].tokens;
                let names = hash_blocks(tokens, self.config.block_size);
                let first = *first_block as usize;
                assert_eq!(
                    hashes[..],
                    names[first..first + hashes.len()],
                    "the names are those of the request's tokens"
                );
                assert_eq!(*parent, first.checked_sub(1).map(|before| names[before]));
                assert!(
                    parent.is_none_or(|parent| self.cache.contains(&parent)),
                    "a parent is cached before its child"
                );
                for hash in hashes {
                    assert!(self.cache.insert(*hash), "a block is stored once");
                }
            }
            KvChange::Stored {
                parent,
                hashes,
                tier: Tier::Host,
                ..
            } => {
                for hash in parent.iter().chain(hashes) {
                    assert!(
                        self.cache.contains(hash),
                        "what is evicted is still known as cached, and so is its parent"
                    );
                }
                for hash in hashes {
                    assert!(self.host.insert(*hash), "a block is in host memory once");
                }
            }
            KvChange::Removed { hashes, tier } => {
                let held = match tier {
                    Tier::Gpu => &mut self.cache,
                    Tier::Host => &mut self.host,
                };
                for hash in hashes {
                    assert!(held.remove(hash), "only a cached block is removed");
                }
            }
            KvChange::Cleared => {
                self.cache.clear();
                self.host.clear();
            }
        }
        self.events.push(event);
    }

    /// Computes an item's tokens: reads the context before them, writes their KV, samples after the last.
    fn run_item(&mut self, item: &StepItem) -> Option<Sampled> {
        let table = self.engine.block_table(item.id).to_vec();
        let (start, end) = (item.start as usize, (item.start + item.count) as usize);
        let request = &self.requests[&item.id];
        assert!(
            item.count > 0 && end <= request.tokens.len(),
            "only known tokens are computed: {item:?}"
        );
        let prints = fingerprints(&request.tokens);
        self.assert_holds(item.id, &table, &prints[..start]);
        let request = self.requests.get_mut(&item.id).expect("a request in a step is known");
        request.computed.extend(start..end.min(request.prompt));
        for (position, print) in prints.iter().enumerate().take(end).skip(start) {
            let (block, slot) = self.place(&table, position);
            self.memory[block.0 as usize][slot] = *print;
        }
        let request = self.requests.get_mut(&item.id).expect("a request in a step is known");
        if request.end.is_some() {
            return None;
        }
        let decode = item.count == 1 && end == request.tokens.len() && start >= request.prompt;
        assert_eq!(
            item.decode, decode,
            "a decode computes the last sampled token: {item:?}"
        );
        assert_eq!(
            item.sample,
            end == request.tokens.len(),
            "the last known token samples the next: {item:?}"
        );
        if !item.sample {
            return None;
        }
        // Like a greedy model: the next token depends on all tokens before it and on nothing else.
        let token = u32::try_from(prints[end - 1] % 50_000).expect("small");
        request.tokens.push(token);
        let output = u32::try_from(request.tokens.len() - request.prompt).expect("small");
        let whole = request.tokens.len().is_multiple_of(self.config.block_size as usize);
        let filled = whole
            .then(|| hash_blocks(&request.tokens, self.config.block_size))
            .and_then(|names| names.last().copied());
        Some(Sampled {
            id: item.id,
            stop: output >= request.stop_after,
            filled,
        })
    }

    fn place(&self, table: &[BlockId], position: usize) -> (BlockId, usize) {
        let size = self.config.block_size as usize;
        (table[position / size], position % size)
    }

    fn assert_holds(&self, id: RequestId, table: &[BlockId], prints: &[u64]) {
        for (position, print) in prints.iter().enumerate() {
            let (block, slot) = self.place(table, position);
            let found = self.memory[block.0 as usize][slot];
            assert_eq!(found, *print, "`{id}`: KV of token {position} in block {}", block.0);
        }
    }

    fn check_export(&self, export: &Export) {
        let request = &self.requests[&export.id];
        assert_eq!(export.tokens as usize, request.prompt);
        assert_eq!(
            export.blocks.len(),
            request.prompt.div_ceil(self.config.block_size as usize)
        );
        self.assert_holds(
            export.id,
            &export.blocks,
            &fingerprints(&request.tokens[..request.prompt]),
        );
    }

    /// What is to be copied is there, and goes on where the request's cached KV ends.
    fn check_reload(&self, reload: &Reload) {
        let names = hash_blocks(&self.requests[&reload.id].tokens, self.config.block_size);
        let first = reload.first_block as usize;
        assert!(!reload.blocks.is_empty() && reload.blocks.len() == reload.hashes.len());
        assert_eq!(reload.hashes[..], names[first..first + reload.hashes.len()]);
        for hash in &reload.hashes {
            assert!(self.host.contains(hash), "what is copied is in host memory");
        }
        let table = self.engine.block_table(reload.id);
        assert_eq!(reload.blocks[..], table[first..first + reload.blocks.len()]);
    }

    fn write_import(&mut self, import: &Import) {
        self.write_blocks(import.id, import.first_block, &import.blocks);
    }

    fn write_blocks(&mut self, id: RequestId, first_block: u32, blocks: &[BlockId]) {
        let size = self.config.block_size as usize;
        let prints = fingerprints(&self.requests[&id].tokens);
        for (index, block) in blocks.iter().enumerate() {
            let first = (first_block as usize + index) * size;
            for (slot, print) in prints[first..].iter().take(size).enumerate() {
                self.memory[block.0 as usize][slot] = *print;
            }
        }
    }
}

/// A request that was served got each prompt token from one source, and as many tokens as it was to get.
fn assert_sources_add_up(request: &Request, finished: &Finished) {
    let usage = finished.usage;
    match finished.reason {
        FinishReason::Stop => assert_eq!(usage.output_tokens, request.stop_after),
        FinishReason::Length => assert_eq!(usage.output_tokens, request.max_output),
        FinishReason::ImportFailed(_) => assert_eq!(usage.output_tokens, 0),
        FinishReason::Aborted => return,
    }
    let got = usage.local_cached_tokens + usage.host_cached_tokens + usage.imported_tokens;
    assert!(
        got < usage.prompt_tokens,
        "the last prompt token is computed: {finished:?}"
    );
    let served = matches!(finished.reason, FinishReason::Stop | FinishReason::Length);
    if served && usage.preemptions == 0 {
        let computed = u32::try_from(request.computed.len()).expect("small");
        assert_eq!(got + computed, usage.prompt_tokens, "the sources add up: {finished:?}");
    }
}

/// One number for the tokens up to each position.
fn fingerprints(tokens: &[u32]) -> Vec<u64> {
    let mut print = 0xcbf2_9ce4_8422_2325_u64;
    let step = |token: &u32| {
        print = (print ^ u64::from(*token))
            .wrapping_mul(0x0000_0100_0000_01b3)
            .rotate_left(17);
        print
    };
    tokens.iter().map(step).collect()
}

/// Tokens that no other prompt of this `content` number shares.
pub fn tokens(content: u32, count: usize) -> Vec<u32> {
    (0..count)
        .map(|position| content * 100_000 + u32::try_from(position).expect("small"))
        .collect()
}

/// A small engine: blocks of 4 tokens, steps of 16.
pub fn small(kv_blocks: u32) -> EngineConfig {
    EngineConfig {
        block_size: 4,
        kv_blocks,
        max_batch_tokens: 16,
        max_running: 4,
        max_waiting: 8,
        max_context_tokens: 400,
        export_lease: Duration::from_secs(1),
        import_timeout: Duration::from_secs(2),
        ..EngineConfig::default()
    }
}
