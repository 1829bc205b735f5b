//! Workers without threads and sockets: executors, stepped in an order that a seed chooses, with transfers in memory.

use homing_engine::api::{EngineConfig, ExportEnd, ImportError, Transfer};
use homing_model::{Model, Tokenizer};
use homing_units::{Duration, Instant, RequestId, Rng};
use homing_worker::executor::{Effect, Executor, Outcome, PullOrder};
use homing_worker::{ExportView, ModelBackend, Request};
use rand::RngExt as _;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// A token and the digest of the logits it was chosen from.
pub type Row = (u32, u64);

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    Finished,
    Aborted,
    ImportFailed(ImportError),
    Rejected,
}

/// What became of a request.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    pub rows: Vec<Row>,
    pub end: Option<End>,
    pub export: Option<ExportView>,
    pub cached: u32,
    pub imported: u32,
    pub preemptions: u32,
}

/// A request on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Job {
    pub node: usize,
    pub id: RequestId,
}

/// How often invariants are checked: a check looks at every block.
const CHECK_EVERY: u64 = 16;

/// A pull on its way.
struct Pull {
    order: PullOrder,
    into: usize,
    from: Job,
    /// Blocks still to copy.
    left: VecDeque<u32>,
    /// Break after so many more blocks.
    breaks: Option<u32>,
}

struct Node {
    executor: Executor<ModelBackend>,
    /// Where imports come from.
    sources: BTreeMap<RequestId, Job>,
}

/// Workers that share a clock.
pub struct Cluster {
    nodes: Vec<Node>,
    pulls: Vec<Pull>,
    now: Instant,
    next_id: u64,
    pumped: u64,
    pub outputs: BTreeMap<Job, Outputs>,
    pub leases_ended: u32,
    pub acked: u32,
    /// Every seventh pull breaks off halfway.
    pub breaks: bool,
}

impl Cluster {
    pub fn new(model: &Arc<Model>, configs: &[EngineConfig]) -> Self {
        let nodes = configs.iter().map(|config| {
            let backend = ModelBackend::new(model.clone(), config.block_size, config.kv_blocks, true);
            Node {
                executor: Executor::new(config.clone(), backend, Tokenizer::bytes()),
                sources: BTreeMap::new(),
            }
        });
        Self {
            nodes: nodes.collect(),
            pulls: Vec::new(),
            now: Instant::ZERO,
            next_id: 0,
            pumped: 0,
            outputs: BTreeMap::new(),
            leases_ended: 0,
            acked: 0,
            breaks: false,
        }
    }

    /// Hands a request to a worker; `from` is where its KV is on offer.
    pub fn submit(&mut self, node: usize, request: Request, from: Option<Job>) -> Job {
        let job = Job {
            node,
            id: RequestId(self.next_id),
        };
        self.next_id += 1;
        if let Some(from) = from {
            self.nodes[node].sources.insert(job.id, from);
        }
        self.outputs.insert(job, Outputs::default());
        self.nodes[node].executor.submit(self.now, job.id, request);
        self.pump(node);
        job
    }

    pub fn abort(&mut self, job: Job) {
        self.nodes[job.node].executor.abort(self.now, job.id);
        self.pump(job.node);
    }

    pub fn clear_cache(&mut self, node: usize) {
        self.nodes[node].executor.clear_cache(self.now);
        self.pump(node);
    }

    /// One thing, chosen by chance among those that can happen; `false` when nothing can without time passing.
    pub fn advance(&mut self, rng: &mut Rng) -> bool {
        self.now += Duration::from_micros(10);
        let ready: Vec<usize> = (0..self.nodes.len())
            .filter(|node| self.nodes[*node].executor.step_ready())
            .collect();
        let choices = ready.len() + self.pulls.len();
        if choices == 0 {
            return false;
        }
        match rng.random_range(0..choices) {
            choice if choice < ready.len() => self.step(ready[choice]),
            choice => self.copy(choice - ready.len()),
        }
        true
    }

    /// Runs until nothing happens any more and every lease has ended.
    pub fn settle(&mut self, rng: &mut Rng) {
        loop {
            while self.advance(rng) {}
            let Some(due) = self.nodes.iter().filter_map(|node| node.executor.poll_timeout()).min() else {
                return;
            };
            self.now = self.now.max(due);
            for node in 0..self.nodes.len() {
                self.nodes[node].executor.timeout(self.now);
                self.pump(node);
            }
        }
    }

    /// Whether a request is over.
    pub fn is_over(&self, job: Job) -> bool {
        self.outputs[&job].end.is_some()
    }

    pub fn check(&self) {
        self.nodes.iter().for_each(|node| node.executor.check_invariants());
    }

    /// Evictions on all workers, in blocks.
    pub fn evicted(&self) -> u64 {
        self.nodes
            .iter()
            .map(|node| node.executor.snapshot().evicted_blocks)
            .sum()
    }

    /// Panics unless nothing is in use on any worker.
    pub fn check_idle(&self) {
        self.check();
        assert!(self.pulls.is_empty());
        for node in &self.nodes {
            let load = node.executor.snapshot();
            assert_eq!(
                (load.running, load.waiting, load.importing, load.exporting),
                (0, 0, 0, 0),
                "{load:?}"
            );
            assert_eq!(
                load.blocks_free + load.blocks_evictable,
                load.blocks_total,
                "a block leaked: {load:?}"
            );
        }
    }

    fn step(&mut self, node: usize) {
        let executor = &mut self.nodes[node].executor;
        executor.run_step().expect("the forward pass works");
        executor.complete_step(self.now);
        self.pump(node);
    }

    /// Copies the next block of a pull, or ends it.
    fn copy(&mut self, index: usize) {
        let pull = &mut self.pulls[index];
        let (into, id, from) = (pull.into, pull.order.id, pull.from);
        if pull.breaks == Some(0) {
            self.end_pull(index, Err(ImportError::Corrupt));
            return;
        }
        pull.breaks = pull.breaks.map(|left| left - 1);
        let Some(block) = pull.left.pop_front() else {
            self.nodes[from.node].executor.export_ack(self.now, from.id);
            self.pump(from.node);
            self.end_pull(index, Ok(()));
            return;
        };
        let Some(payload) = self.nodes[from.node].executor.read_export(from.id, block) else {
            self.end_pull(index, Err(ImportError::Unknown));
            return;
        };
        // The puller may have given it up: then nothing is written, and its end changes nothing.
        if let Err(error) = self.nodes[into].executor.write_import(id, block, &payload) {
            self.end_pull(index, Err(error));
        }
    }

    fn end_pull(&mut self, index: usize, outcome: Result<(), ImportError>) {
        let pull = self.pulls.swap_remove(index);
        self.nodes[pull.into]
            .executor
            .import_done(self.now, pull.order.id, outcome);
        self.pump(pull.into);
    }

    fn pump(&mut self, node: usize) {
        while let Some(effect) = self.nodes[node].executor.poll() {
            self.dispatch(node, effect);
        }
        self.pumped += 1;
        if self.pumped.is_multiple_of(CHECK_EVERY) {
            self.nodes[node].executor.check_invariants();
        }
    }

    fn dispatch(&mut self, node: usize, effect: Effect) {
        match effect {
            Effect::Token(token) => {
                let output = self.output(node, token.id);
                output.rows.push((token.token, token.digest.expect("digests are on")));
            }
            Effect::Pull(order) => {
                let from = self.nodes[node].sources[&order.id];
                let left: VecDeque<u32> = (order.first_block..order.first_block + order.blocks).collect();
                let breaks = (self.breaks && order.id.0.is_multiple_of(7)).then_some(order.blocks / 2);
                self.pulls.push(Pull {
                    order,
                    into: node,
                    from,
                    left,
                    breaks,
                });
            }
            Effect::ReleaseSource { id } => {
                let from = self.nodes[node].sources[&id];
                self.nodes[from.node].executor.export_ack(self.now, from.id);
                if from.node != node {
                    self.pump(from.node);
                }
            }
            Effect::Rejected { id, .. } => self.output(node, id).end = Some(End::Rejected),
            Effect::Ended(ended) => {
                let output = self.output(node, ended.id);
                output.export = ended.export;
                output.cached = ended.usage.local_cached_tokens;
                output.imported = ended.usage.imported_tokens;
                output.preemptions = ended.usage.preemptions;
                output.end = Some(match ended.outcome {
                    Outcome::Length | Outcome::Stop(_) => End::Finished,
                    Outcome::Aborted => End::Aborted,
                    Outcome::ImportFailed(error) => End::ImportFailed(error),
                    Outcome::BackendFailed => panic!("the forward pass works"),
                });
            }
            Effect::ExportEnded { reason, .. } => match reason {
                ExportEnd::Acked => self.acked += 1,
                ExportEnd::LeaseEnded => self.leases_ended += 1,
                ExportEnd::Aborted => {}
            },
            Effect::Kv(_) => {}
        }
    }

    fn output(&mut self, node: usize, id: RequestId) -> &mut Outputs {
        self.outputs.get_mut(&Job { node, id }).expect("it was submitted")
    }
}

/// What one cold worker gives, alone, with room for everything and no cache: the reference.
pub fn cold(model: &Arc<Model>, prompt: &[u32], outputs: u32, chunk: u32) -> Vec<Row> {
    let block_size = 16;
    let blocks = (prompt.len() as u32 + outputs).div_ceil(block_size) + 1;
    let config = EngineConfig {
        block_size,
        kv_blocks: blocks,
        max_batch_tokens: chunk,
        ..EngineConfig::default()
    };
    let mut cluster = Cluster::new(model, &[config]);
    let job = cluster.submit(0, Request::greedy(prompt, block_size, outputs, Transfer::None), None);
    let mut rng = homing_units::rng_for(0, "one worker has no choice");
    while cluster.advance(&mut rng) {}
    let output = cluster.outputs.remove(&job).expect("it was submitted");
    assert_eq!(output.end, Some(End::Finished));
    output.rows
}
