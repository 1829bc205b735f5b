//! Checks that cost, for runs that look for bugs: what lies in every block, and whether the router's index comes to know
//! what the workers hold once nothing goes wrong any more.
//!
//! A run without them keeps no memories and none of this runs.

use super::Simulation;
use super::transfers::Pull;
use crate::checkers::check_nodes;
use crate::client::Client;
use crate::config::SimError;
use crate::fault::Fault;
use crate::heap::Rank;
use crate::memory::Memory;
use crate::node::Node;
use homing_engine::api::{ImportError, KvChange, Reload, StepItem};
use homing_kv::{BlockHash, Tier};
use homing_router::action::WorkerState;
use homing_units::{Duration, RequestId, WorkerId};

/// How long workers have to be found alive again: more probes than the router's default needs to call one dead.
const FOUND_ALIVE: Duration = Duration::from_secs(4);
/// Instants between two checks of the cores' own invariants.
const INSTANTS_A_CHECK: u64 = 32;

impl Simulation<'_> {
    /// The cores' own invariants, more often than a run pays for otherwise.
    pub(super) fn check_cores(&mut self) {
        if !self.memories.is_empty() && self.checkers.instants().is_multiple_of(INSTANTS_A_CHECK) {
            self.router.check_invariants();
            check_nodes(&self.nodes);
        }
    }

    /// A leg has reached its engine, which goes on with it until it hears that nobody wants it any more.
    pub(super) fn remember_request(&mut self, engine_id: RequestId) {
        if self.memories.is_empty() {
            return;
        }
        let leg = self.legs.get(engine_id);
        let client = leg.and_then(|leg| Some((leg, self.asker(leg.id.request)?)));
        if let Some((leg, client)) = client {
            let mut client = client.clone();
            client.prompt = leg.prompt.clone();
            self.remembered.insert(engine_id, client);
        }
    }

    /// A step has run: it read what came before and wrote what it computed.
    pub(super) fn remember_step(&mut self, index: usize, items: &[StepItem]) {
        if self.memories.is_empty() {
            return;
        }
        for item in items {
            let Some(engine) = &self.nodes[index].engine else {
                return;
            };
            let table = engine.block_table(item.id);
            let memory = &mut self.memories[index];
            let Some(client) = self.remembered.get(&item.id) else {
                memory.scribble(table, item.start, item.count);
                continue;
            };
            let names = names(client, item, self.trace.block_size);
            if let Err(found) = memory.check(table, &names, item.start) {
                let found = format!("{found}, for `{}` on `{}`", item.id, self.names[index]);
                self.checkers.note("that a step reads its own context", self.now, found);
            }
            memory.write(table, &names, item.start, item.count);
        }
    }

    /// A pull has ended: what it copied, or spoilt.
    pub(super) fn remember_pull(&mut self, puller: RequestId, pull: &Pull, outcome: Result<(), ImportError>) {
        if self.memories.is_empty() || pull.to_epoch != self.nodes[pull.to].epoch {
            return;
        }
        let (Ok(()), Some(source)) = (outcome, pull.source) else {
            self.memories[pull.to].spoil(&pull.import.blocks);
            return;
        };
        let from = self.nodes[source.node].engine.as_ref();
        let held = from.map_or(&[][..], |engine| engine.block_table(source.engine_id));
        let (first, count) = (pull.import.first_block as usize, pull.import.blocks.len());
        let Some(held) = held
            .get(first..(first + count).min(held.len()))
            .filter(|held| held.len() == count)
        else {
            let found = format!("`{}` of `{}` blocks from the `{first}`th on", held.len(), count);
            self.checkers.note(
                "that a source holds what is pulled until it is acknowledged",
                self.now,
                found,
            );
            return;
        };
        let cells = self.memories[source.node].read(held);
        self.memories[pull.to].fill(&pull.import.blocks, &cells);
        self.check_pulled(puller, pull, first);
    }

    /// What was pulled is what was asked for.
    fn check_pulled(&mut self, puller: RequestId, pull: &Pull, first: usize) {
        let Some(leg) = self.legs.get(puller) else { return };
        let whole = leg.prompt.blocks.get(first..).unwrap_or_default();
        let whole = &whole[..whole.len().min(pull.import.blocks.len())];
        let tokens = u32::try_from(whole.len()).expect("no more blocks than tokens") * self.trace.block_size;
        let checked = self.memories[pull.to].check(&pull.import.blocks, whole, tokens);
        if let Err(found) = checked {
            self.checkers
                .note("that a pull brings what was asked for", self.now, found);
        }
    }

    pub(super) fn remember_reload(&mut self, index: usize, reload: &Reload) {
        if let Some(memory) = self.memories.get_mut(index) {
            memory.begin_reload(reload.clone());
        }
    }

    pub(super) fn remember_reloaded(&mut self, index: usize, id: RequestId) {
        if let Some(memory) = self.memories.get_mut(index) {
            memory.end_reload(id);
        }
    }

    pub(super) fn remember_change(&mut self, index: usize, change: &KvChange) {
        if let Some(memory) = self.memories.get_mut(index) {
            memory.note(change);
        }
    }

    pub(super) fn remember_crash(&mut self, index: usize) {
        if let Some(memory) = self.memories.get_mut(index) {
            memory.lose();
        }
    }

    /// All is mended and everybody says something once more: the router knows the workers as they are.
    pub(super) fn converge(&mut self) -> Result<(), SimError> {
        if self.memories.is_empty() {
            return Ok(());
        }
        for index in 0..self.nodes.len() {
            self.fault(Fault::WorkerRestart(worker(index)));
        }
        self.run_for(FOUND_ALIVE)?;
        for index in 0..self.nodes.len() {
            // A lost batch is found missing when the next one comes.
            self.fault(Fault::Stranger {
                worker: worker(index),
                prompt_tokens: self.trace.block_size + 1,
                output_tokens: 1,
            });
        }
        let router = &self.config.router;
        let doubt = router.clocks.restart_doubt + router.clocks.resync;
        self.run_for(FOUND_ALIVE + doubt * (router.limits.resyncs + 1))?;
        for index in 0..self.nodes.len() {
            self.check_index_of(index);
        }
        self.checkers.result()
    }

    fn run_for(&mut self, lasts: Duration) -> Result<(), SimError> {
        let until = self.now + lasts;
        self.settle()?;
        while let Some((at, wake)) = self.heap.pop() {
            if at > until {
                self.heap.plan(at, Rank::Step, wake);
                break;
            }
            self.now = at;
            self.wake(wake);
            self.settle()?;
        }
        Ok(())
    }

    /// What the router has indexed of a worker is there; and all that is there is indexed, where it claims to know it all.
    fn check_index_of(&mut self, index: usize) {
        let id = worker(index);
        let Some(status) = self.router.view_workers().into_iter().find(|status| status.id == id) else {
            return;
        };
        let cached = self.memories[index].cached();
        let known = |entry: &&(Tier, BlockHash)| self.router.indexes(id, entry.1, entry.0);
        let held = self.nodes[index]
            .engine
            .as_ref()
            .map_or(0, |engine| engine.cached_blocks() as usize);
        let told = cached.iter().filter(|(tier, _)| *tier == Tier::Gpu).count();
        let (all, known) = (cached.len(), cached.iter().filter(known).count());
        let indexed = (status.indexed_gpu_blocks + status.indexed_host_blocks) as usize;
        let found = || {
            format!(
                "`{indexed}` indexed of `{}`, `{known}` of them among its `{all}`: {status:?}",
                status.name
            )
        };
        let now = self.now;
        if held != told {
            let found = format!("`{told}` told, `{held}` held: {}", found());
            self.checkers.note("that KV events tell what is cached", now, found);
        } else if matches!(status.state, WorkerState::Suspect | WorkerState::Dead) {
            self.checkers
                .note("that a worker that lives is found alive", now, found());
        } else if indexed != known {
            self.checkers
                .note("that the index holds nothing that is not there", now, found());
        } else if status.state == WorkerState::Exact && known != all {
            self.checkers
                .note("that the index of an exact worker is whole", now, found());
        }
    }
}

/// The names of the blocks that an item of a step touches.
fn names(client: &Client, item: &StepItem, block_size: u32) -> Vec<BlockHash> {
    let blocks = (item.start + item.count).div_ceil(block_size) as usize;
    let mut names = client.prompt.blocks.to_vec();
    while names.len() < blocks {
        let index = u32::try_from(names.len()).expect("no more blocks than tokens");
        names.push(client.answer_hash(names.last().copied(), index));
    }
    names
}

fn worker(index: usize) -> WorkerId {
    WorkerId(u32::try_from(index).expect("workers are bounded"))
}

impl Simulation<'_> {
    /// Memories for all workers, where they are asked for. Session slots hand the last tokens of an answer, which fill no
    /// block, from turn to turn; what they are called is nobody's business here, so such workers have none.
    pub(super) fn memories(nodes: &[Node], thorough: bool, block_size: u32) -> Vec<Memory> {
        if !thorough || nodes.iter().any(Node::has_slots) {
            return Vec::new();
        }
        nodes
            .iter()
            .map(|node| Memory::new(node.kv_blocks(), block_size))
            .collect()
    }
}
