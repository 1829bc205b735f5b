//! Who computes what in the next step: decodes first, then prefill chunks in order of arrival, then new requests.
//!
//! Blocks are taken for a step when it is planned. When none are left, the last-arrived running request is preempted for
//! one that came before it; one that finds no younger request takes a smaller chunk or sits the step out, and keeps its
//! blocks. A new request gets a place only if the pool has room for all its tokens beyond what the running ones still
//! need, so that preemption is left to growing outputs.
//!
//! It does not run steps (the driver does) and does not look at what they gave (`completion`).

use crate::api::{Output, Step, StepItem, Transfer};
use crate::engine::Engine;
use crate::sequence::Phase;
use homing_kv::{BlockHash, BlockId};
use homing_units::RequestId;
use std::borrow::Cow;

/// A step in the making.
struct Plan {
    items: Vec<StepItem>,
    /// Tokens that may still be added.
    budget: u32,
}

impl Plan {
    fn push(&mut self, item: StepItem) {
        self.budget -= item.count;
        self.items.push(item);
    }

    /// Takes back what was planned for a request.
    fn withdraw(&mut self, id: RequestId) {
        if let Some(index) = self.items.iter().position(|item| item.id == id) {
            self.budget += self.items.remove(index).count;
        }
    }
}

impl Engine {
    /// Starts the imports that there is room for and, when no step is outstanding, plans the next.
    pub(crate) fn plan(&mut self) {
        self.trim_for_those_who_wait();
        self.start_imports();
        self.start_reloads();
        if self.outstanding.is_some() {
            return;
        }
        let mut items = self.plan_step();
        while items.is_empty() && self.trim_for_those_who_are_stuck() {
            items = self.plan_step();
        }
        if items.is_empty() {
            return;
        }
        let step = Step {
            number: self.next_step,
            items,
        };
        self.next_step += 1;
        self.outputs.push_back(Output::Step(step.clone()));
        self.outstanding = Some(step);
    }

    fn plan_step(&mut self) -> Vec<StepItem> {
        let mut plan = Plan {
            items: Vec::new(),
            budget: self.config.max_batch_tokens,
        };
        self.plan_running(&mut plan);
        self.plan_waiting(&mut plan);
        plan.items
    }

    /// Whether one more request may run, import or reload.
    pub(crate) fn place_left(&self) -> bool {
        self.running.len() + self.importing.len() + self.reloading.len() < self.config.max_running as usize
    }

    /// Whether `blocks` more fit beside what the requests in hand still need for the tokens that they have, and a block of
    /// growth for each of them. Blocks `reserved` for older requests that wait stay untouched.
    pub(crate) fn room_for(&self, blocks: u32, reserved: u64) -> bool {
        let in_hand = self.running.values().chain(&self.importing).chain(&self.reloading);
        let promised: u64 = in_hand.map(|id| self.missing_blocks(*id)).sum();
        let growth = self.running.len() as u64;
        u64::from(blocks) + promised + growth + reserved <= u64::from(self.cache.available())
    }

    /// Blocks that a request with a place still lacks for its tokens so far.
    fn missing_blocks(&self, id: RequestId) -> u64 {
        let sequence = &self.sequences[&id];
        let needed = sequence.tokens().div_ceil(self.config.block_size);
        u64::from(needed) - sequence.table.len() as u64
    }

    /// Serves the running requests that decode, then those that prefill, both in order of arrival.
    fn plan_running(&mut self, plan: &mut Plan) {
        let mut ids: Vec<RequestId> = self.running.values().copied().collect();
        let mut prefilling = 0;
        for index in 0..ids.len() {
            let id = ids[index];
            if self.sequences[&id].prefilling() {
                ids[prefilling] = id;
                prefilling += 1;
            } else {
                self.serve_if_running(id, plan);
            }
        }
        for id in &ids[..prefilling] {
            self.serve_if_running(*id, plan);
        }
    }

    /// One that came before it in this very plan may have preempted it.
    fn serve_if_running(&mut self, id: RequestId, plan: &mut Plan) {
        if plan.budget > 0 && self.sequences[&id].phase == Phase::Running {
            self.serve(id, plan);
        }
    }

    fn plan_waiting(&mut self, plan: &mut Plan) {
        while plan.budget > 0 && self.place_left() && !self.waiting.blocked {
            let Some(id) = self.waiting.head() else { return };
            if !self.admit(id) {
                if self.trim_for_lack_of_room() {
                    continue;
                }
                self.waiting.blocked = true;
                return;
            }
            if self.sequences[&id].phase == Phase::Running {
                self.serve(id, plan);
            }
        }
    }

    /// Gives the oldest waiting request a place, with what is cached of it, if the pool has room for the rest; where host
    /// memory has more of it, that comes first. One that was
    /// preempted in this very plan does not come back by this: its blocks went to another, which runs and may grow.
    pub(crate) fn admit(&mut self, id: RequestId) -> bool {
        let sequence = &self.sequences[&id];
        let older_offers = self.offered.oldest().is_some_and(|oldest| oldest < sequence.arrival);
        // Seeds of a session-slot engine stand in a queue of their own, which holds nobody up.
        let reserved = if older_offers && !self.slots.are_used() {
            self.offered.demand_blocks()
        } else {
            0
        };
        let Some(blocks) = self.lock_prefix(id, reserved) else {
            return false;
        };
        self.leave_phase(id);
        self.take_prefix(id, blocks);
        let on_host = self.host_continuation(id);
        if on_host.is_empty() {
            self.enter_running(id);
        } else {
            let count = on_host.len();
            self.take_blocks_for_fetch(id, count, &on_host);
            self.order_reload(id, on_host);
        }
        true
    }

    /// Takes a reference on the cached blocks of a request that waits, if the pool has room for all its other tokens.
    pub(crate) fn lock_prefix(&mut self, id: RequestId, reserved: u64) -> Option<Vec<BlockId>> {
        let sequence = &self.sequences[&id];
        let owner = sequence.owner;
        let needed = sequence.tokens().div_ceil(self.config.block_size);
        let hashes = if self.slots.are_used() && matches!(sequence.transfer, Transfer::Import { .. }) {
            // A seed comes whole.
            Cow::Borrowed(&[][..])
        } else {
            sequence.reusable_hashes(self.config.block_size)
        };
        // Locked first: cached blocks that nobody uses count as available until they are.
        let blocks = self.cache.acquire_prefix(&hashes);
        let missing = needed - u32::try_from(blocks.len()).expect("no more blocks than hashes");
        if self.room_for(missing, reserved) {
            return Some(blocks);
        }
        self.cache.release(&blocks, owner);
        None
    }

    /// Hands its locked prefix to a request, and counts what was found the first time.
    pub(crate) fn take_prefix(&mut self, id: RequestId, blocks: Vec<BlockId>) {
        let block_size = self.config.block_size;
        let (asked, found) = self.update(id, |sequence| {
            let matched = u32::try_from(blocks.len()).expect("a table is as long as a u32 of tokens");
            sequence.table = blocks;
            sequence.named = matched;
            sequence.computed = matched * block_size;
            let asked = if sequence.looked_up { 0 } else { sequence.prompt.tokens };
            sequence.looked_up = true;
            let cached = sequence.computed.min(sequence.prompt.tokens);
            let found = cached.saturating_sub(sequence.counted);
            sequence.counted += found;
            sequence.usage.local_cached_tokens += found;
            (asked, found)
        });
        self.totals.cache_query_tokens += u64::from(asked);
        self.totals.cache_hit_tokens += u64::from(found);
    }

    /// Adds so many blocks to the table of a request that [`Self::lock_prefix`] found room for. What they will be filled with
    /// from host memory is kept there first: this may evict, and so push something out of the host tier.
    pub(crate) fn take_blocks_for_fetch(&mut self, id: RequestId, count: usize, on_host: &[BlockHash]) {
        self.cache.lock_host(on_host);
        let count = u32::try_from(count).expect("no more than the request's tokens");
        let blocks = self.cache.allocate(id, count, &mut self.outputs);
        let sequence = self.sequences.get_mut(&id).expect("a waiting request is known");
        let blocks = blocks.expect("there is room for all of the request's tokens");
        sequence.table.extend(blocks);
    }

    pub(crate) fn enter_running(&mut self, id: RequestId) {
        let arrival = self.update(id, |sequence| {
            sequence.phase = Phase::Running;
            sequence.arrival
        });
        self.running.insert(arrival, id);
    }

    /// Adds as many pending tokens of a running request to the plan as budget and blocks allow.
    fn serve(&mut self, id: RequestId, plan: &mut Plan) {
        let sequence = &self.sequences[&id];
        let count = sequence.pending().min(plan.budget);
        let missing = sequence.blocks_missing_for(count, self.config.block_size);
        if missing == 0 {
            plan.push(sequence.item(count));
            return;
        }
        let (count, blocks) = match self.take_blocks(id, missing, plan) {
            Some(blocks) => (count, blocks),
            None => self.take_rest(id, count),
        };
        if count == 0 {
            return;
        }
        let sequence = self.sequences.get_mut(&id).expect("a running request is known");
        sequence.table.extend(blocks);
        plan.push(sequence.item(count));
    }

    /// Allocates blocks for a request, at the cost of requests that came after it if it must.
    fn take_blocks(&mut self, id: RequestId, count: u32, plan: &mut Plan) -> Option<Vec<BlockId>> {
        let arrival = self.sequences[&id].arrival;
        loop {
            if let Some(blocks) = self.cache.allocate(id, count, &mut self.outputs) {
                return Some(blocks);
            }
            if self.trim_for_lack_of_room() {
                continue;
            }
            let (youngest, victim) = self.running.last_key_value().map(|(at, id)| (*at, *id))?;
            if youngest <= arrival {
                return None;
            }
            self.preempt(victim, plan);
        }
    }

    /// With nobody left to preempt: what fits into the request's last block and the blocks that can be had.
    fn take_rest(&mut self, id: RequestId, count: u32) -> (u32, Vec<BlockId>) {
        let sequence = &self.sequences[&id];
        let blocks = sequence.table.len() as u64 + u64::from(self.cache.available());
        let room = blocks * u64::from(self.config.block_size) - u64::from(sequence.computed);
        let count = u32::try_from(room).map_or(count, |room| room.min(count));
        let missing = sequence.blocks_missing_for(count, self.config.block_size);
        let blocks = self.cache.allocate(id, missing, &mut self.outputs);
        (count, blocks.expect("no more blocks than can be had"))
    }

    /// Takes a running request's blocks away. It waits again, before all that arrived after it.
    fn preempt(&mut self, id: RequestId, plan: &mut Plan) {
        plan.withdraw(id);
        self.leave_phase(id);
        let (blocks, owner) = self.update(id, |sequence| {
            sequence.phase = Phase::Waiting;
            sequence.usage.preemptions += 1;
            (sequence.drop_kv(), sequence.owner)
        });
        self.release(&blocks, owner);
        self.waiting.insert(&self.sequences[&id], self.config.block_size);
        self.totals.preemptions += 1;
        self.outputs.push_back(Output::Preempted { id });
    }
}
