//! What is wrong at the moment, and what waits for it to end: paused workers, links that are cut, messages that will be
//! lost, a router that stands still, requests of strangers.
//!
//! It is all empty in a run without faults. What a fault does when it happens is in `faults.rs`.

use super::{KV_EVENT_LATENCY, Simulation, Wake};
use crate::fault::{LinkState, Mishap};
use crate::heap::Rank;
use homing_engine::api::{Input, Sampled, StepItem};
use homing_kv::{BlockHash, Prompt, chain};
use homing_router::event::{Event, KvBatch};
use homing_units::{BootEpoch, Instant, RequestId};
use std::collections::{BTreeMap, BTreeSet};

/// Engines know strangers by ids from here on; the simulator's own are below.
const STRANGERS: u64 = 1 << 62;

/// What is wrong at the moment.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    /// Paused workers, with what reached them since, in order.
    paused: BTreeMap<usize, Vec<Wake>>,
    /// Links that are not up, by sender and receiver.
    links: BTreeMap<(usize, usize), LinkState>,
    /// Pulls that would have ended, had their links not stalled.
    stalled_pulls: BTreeMap<(usize, usize), Vec<RequestId>>,
    /// Probes that will be lost, by worker.
    probes: BTreeMap<usize, u32>,
    /// Load reports that will be lost, by worker.
    loads: BTreeMap<usize, u32>,
    /// Batches of KV events that something will happen to, by worker.
    batches: BTreeMap<usize, (u32, Mishap)>,
    /// The router's core stands still until then.
    router_stands_until: Option<Instant>,
    /// Clients that have hung up and that the router's core takes for there.
    gone: BTreeSet<RequestId>,
    strangers: BTreeMap<RequestId, Stranger>,
    strangers_ever: u64,
}

/// A request that was sent past the router.
#[derive(Debug)]
struct Stranger {
    block_size: u32,
    tokens: u32,
    tip: Option<BlockHash>,
}

impl Trouble {
    pub(super) fn pause(&mut self, node: usize) {
        self.paused.entry(node).or_default();
    }

    /// A worker goes on, or dies; gives what has reached it, in order.
    pub(super) fn unpause(&mut self, node: usize) -> Vec<Wake> {
        self.paused.remove(&node).unwrap_or_default()
    }

    pub(super) fn is_paused(&self, node: usize) -> bool {
        self.paused.contains_key(&node)
    }

    /// Workers that are paused.
    pub(super) fn all_paused(&self) -> Vec<usize> {
        self.paused.keys().copied().collect()
    }

    /// A link changes; gives the pulls that waited for it, where it moves bytes again.
    pub(super) fn set_link(&mut self, link: (usize, usize), state: LinkState) -> Vec<RequestId> {
        match state {
            LinkState::Up => self.links.remove(&link),
            _ => self.links.insert(link, state),
        };
        match state {
            LinkState::Stalled => Vec::new(),
            LinkState::Up | LinkState::Slow { .. } | LinkState::Cut => {
                self.stalled_pulls.remove(&link).unwrap_or_default()
            }
        }
    }

    /// Links that are not up.
    pub(super) fn all_links(&self) -> Vec<(usize, usize)> {
        self.links.keys().copied().collect()
    }

    pub(super) fn is_cut(&self, link: (usize, usize)) -> bool {
        self.links.get(&link) == Some(&LinkState::Cut)
    }

    pub(super) fn link_percent(&self, link: (usize, usize)) -> u32 {
        match self.links.get(&link) {
            Some(LinkState::Slow { percent }) => *percent,
            _ => 100,
        }
    }

    pub(super) fn lose_probes(&mut self, node: usize, probes: u32) {
        self.probes.insert(node, probes);
    }

    pub(super) fn lose_loads(&mut self, node: usize, reports: u32) {
        self.loads.insert(node, reports);
    }

    /// Whether a probe of this worker goes unanswered.
    pub(super) fn loses_probe(&mut self, node: usize) -> bool {
        counts_down(&mut self.probes, node) || self.is_paused(node)
    }

    /// Whether a report of this worker's load does not arrive.
    pub(super) fn loses_load(&mut self, node: usize) -> bool {
        counts_down(&mut self.loads, node)
    }

    pub(super) fn disturb_batches(&mut self, node: usize, batches: u32, mishap: Mishap) {
        self.batches.insert(node, (batches, mishap));
    }

    /// What happens to the next batch of KV events of this worker.
    fn next_batch(&mut self, node: usize) -> Option<Mishap> {
        let (left, mishap) = self.batches.get_mut(&node)?;
        let mishap = *mishap;
        *left = left.saturating_sub(1);
        if *left == 0 {
            self.batches.remove(&node);
        }
        Some(mishap)
    }

    /// No message meets anything any more.
    pub(super) fn calm(&mut self) {
        self.probes.clear();
        self.loads.clear();
        self.batches.clear();
    }

    pub(super) const fn router_stands(&self) -> bool {
        self.router_stands_until.is_some()
    }

    /// The router's core stands still until then, or longer if it does already.
    pub(super) fn router_stops(&mut self, until: Instant) {
        self.router_stands_until = self.router_stands_until.max(Some(until));
    }

    pub(super) fn router_goes_on(&mut self, now: Instant) {
        self.router_stands_until = self.router_stands_until.filter(|until| *until > now);
    }

    pub(super) fn hung_up(&mut self, request: RequestId) {
        self.gone.insert(request);
    }

    /// Whether this client has hung up and the router's core does not know.
    pub(super) fn is_gone(&self, request: RequestId) -> bool {
        self.gone.contains(&request)
    }

    pub(super) fn gone_is_known(&mut self, request: RequestId) {
        self.gone.remove(&request);
    }

    /// A stranger's request: its id and its prompt, which nobody shares.
    pub(super) fn stranger(&mut self, tokens: u32, block_size: u32) -> (RequestId, Prompt) {
        let id = RequestId(STRANGERS + self.strangers_ever);
        self.strangers_ever += 1;
        let mut blocks: Vec<BlockHash> = Vec::new();
        for block in 0..tokens / block_size {
            let hash = chain(blocks.last().copied(), &[u32::MAX, id.0 as u32, block]);
            blocks.push(hash);
        }
        let prompt = Prompt::new(blocks, tokens, block_size);
        let stranger = Stranger {
            block_size,
            tokens,
            tip: prompt.tip(),
        };
        self.strangers.insert(id, stranger);
        (id, prompt)
    }

    pub(super) fn stranger_ended(&mut self, id: RequestId) {
        self.strangers.remove(&id);
    }

    /// The hash of the block that a stranger's next token fills, if it fills one.
    fn next_token(&mut self, id: RequestId) -> Option<Option<BlockHash>> {
        let stranger = self.strangers.get_mut(&id)?;
        stranger.tokens += 1;
        let filled = stranger
            .tokens
            .is_multiple_of(stranger.block_size)
            .then(|| chain(stranger.tip, &[u32::MAX, id.0 as u32, stranger.tokens]));
        stranger.tip = filled.or(stranger.tip);
        Some(filled)
    }
}

impl Simulation<'_> {
    /// What happens now, unless it has to wait for a worker that is paused or for a link that is stalled.
    pub(super) fn unless_held(&mut self, wake: Wake) -> Option<Wake> {
        if self.trouble.paused.is_empty() && self.trouble.links.is_empty() {
            return Some(wake);
        }
        let paused = |node: usize| self.trouble.is_paused(node).then_some(node);
        let waits_for = match &wake {
            Wake::Arrival(engine_id) => self.legs.get(*engine_id).and_then(|leg| paused(leg.node)),
            Wake::StepEnds { node, .. }
            | Wake::EngineTimer { node, .. }
            | Wake::ReloadEnds { node, .. }
            | Wake::Told { node, .. } => paused(*node),
            Wake::Resync { worker, .. } => paused(worker.0 as usize),
            Wake::PullEnds(puller) => match self.ends_of(*puller) {
                Some((Some(from), to)) if self.trouble.links.get(&(from, to)) == Some(&LinkState::Stalled) => {
                    self.trouble.stalled_pulls.entry((from, to)).or_default().push(*puller);
                    return None;
                }
                Some((from, to)) => from.and_then(paused).or_else(|| paused(to)),
                None => None,
            },
            _ => None,
        };
        match waits_for {
            Some(node) => {
                self.trouble.paused.entry(node).or_default().push(wake);
                None
            }
            None => Some(wake),
        }
    }

    /// An engine is told something, in the life that it is meant for; one that is paused hears of it later.
    pub(super) fn tell_engine(&mut self, node: usize, epoch: BootEpoch, input: Input) {
        if self.trouble.is_paused(node) {
            let input = Box::new(input);
            self.wake(Wake::Told { node, epoch, input });
        } else {
            self.told(node, epoch, input);
        }
    }

    pub(super) fn told(&mut self, index: usize, epoch: BootEpoch, input: Input) {
        let node = &mut self.nodes[index];
        if let Some(engine) = node.engine.as_mut().filter(|_| node.epoch == epoch) {
            engine.handle(self.now, input);
            self.changed.insert(index);
        }
    }

    /// A batch of KV events goes to the router.
    pub(super) fn publish(&mut self, index: usize, batch: KvBatch) {
        let at = self.now + KV_EVENT_LATENCY;
        let (at, copies) = match self.trouble.next_batch(index) {
            None => (at, 1),
            Some(Mishap::Lost) => return,
            Some(Mishap::Twice) => (at, 2),
            Some(Mishap::Late(lasts)) => (at + lasts, 1),
        };
        for _ in 0..copies {
            let news = Wake::News(Box::new(Event::Kv(batch.clone())));
            self.heap.plan(at, Rank::News, news);
        }
    }

    /// What the router's core hears next, unless it stands still.
    pub(super) fn next_news(&mut self) -> Option<Event> {
        if self.trouble.router_stands() {
            return None;
        }
        self.news.pop_front()
    }

    /// A token for a stranger, if it is for one.
    pub(super) fn sample_for_stranger(&mut self, item: &StepItem) -> Option<Sampled> {
        let filled = self.trouble.next_token(item.id)?;
        self.checkers.stranger_tokens += 1;
        Some(Sampled {
            id: item.id,
            stop: false,
            filled,
        })
    }
}

/// Takes one from what is left, if anything is.
fn counts_down(left: &mut BTreeMap<usize, u32>, node: usize) -> bool {
    let Some(count) = left.get_mut(&node) else { return false };
    *count = count.saturating_sub(1);
    if *count == 0 {
        left.remove(&node);
    }
    true
}
