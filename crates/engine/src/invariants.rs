//! The engine's self-check: everything that is kept up to date bit by bit, counted again from scratch.
//!
//! Slow and complete, and apart from the code that it judges. Tests and the simulator call it; no hot path does.

use crate::engine::Engine;
use crate::load::Load;
use crate::queue::Queue;
use crate::sequence::{Phase, Sequence};
use homing_kv::{BlockHash, BlockId};
use homing_units::RequestId;
use std::collections::{BTreeMap, BTreeSet};

impl Engine {
    /// Checks everything that must hold between two calls. Costs a pass over all requests and the pool.
    ///
    /// # Panics
    /// If something does not hold, which is a bug in the engine.
    pub fn check_invariants(&self) {
        self.cache.pool().check_invariants();
        self.cache.host().check_invariants();
        self.check_reloads();
        self.check_references();
        self.slots.check_invariants();
        self.check_owners();
        self.check_phases();
        self.check_bounds();
        self.check_load();
        for sequence in self.sequences.values() {
            self.check_sequence(sequence);
        }
        self.check_outstanding();
        self.check_deadlines();
    }

    /// Every reference of the pool is one of ours, and the other way round.
    fn check_references(&self) {
        let tables = self.sequences.values().flat_map(|sequence| &sequence.table);
        let held = self.exports.values().flat_map(|held| &held.blocks);
        let fenced = self.fenced.values().flatten();
        let mut expected: BTreeMap<BlockId, u32> = BTreeMap::new();
        for block in tables.chain(held).chain(fenced).chain(self.slots.blocks()) {
            *expected.entry(*block).or_default() += 1;
        }
        let dump = self.cache.pool().dump();
        let stranded = dump.blocks.iter().find(|state| state.pinned && state.references == 0);
        assert_eq!(stranded, None, "a block that is in use is held by a request");
        let states = dump.blocks.into_iter();
        let actual: BTreeMap<BlockId, u32> = states
            .filter(|state| state.references > 0)
            .map(|state| (state.block, state.references))
            .collect();
        assert_eq!(
            actual, expected,
            "blocks are held by requests, exports, fences and slots alone"
        );
    }

    /// Every request of a session is known to be here.
    fn check_owners(&self) {
        let mut here = BTreeMap::new();
        for owner in self.sequences.values().filter_map(|sequence| sequence.owner) {
            *here.entry(owner.session).or_default() += 1;
        }
        self.cache.check_returns(&here);
        if let Some(residents) = &self.residents {
            residents.check_invariants();
        }
    }

    /// Every request stands in the list of its phase and in no other.
    fn check_phases(&self) {
        let of = |wanted: fn(Phase) -> bool| -> BTreeSet<RequestId> {
            let matching = self.sequences.values().filter(|sequence| wanted(sequence.phase));
            matching.map(|sequence| sequence.id).collect()
        };
        let listed = |queue: &Queue| -> BTreeSet<RequestId> { queue.ids().collect() };
        assert_eq!(
            of(|phase| phase == Phase::Waiting),
            listed(&self.waiting),
            "who waits is queued"
        );
        assert_eq!(
            of(|phase| phase == Phase::Offered),
            listed(&self.offered),
            "whose KV is on offer is queued"
        );
        assert_eq!(
            of(|phase| phase == Phase::Running),
            self.running.values().copied().collect(),
            "who runs is listed"
        );
        assert_eq!(
            of(|phase| matches!(phase, Phase::Importing { .. })),
            self.importing,
            "who imports is listed"
        );
        assert_eq!(
            of(|phase| matches!(phase, Phase::Reloading { .. })),
            self.reloading,
            "who reloads is listed"
        );
        for (arrival, id) in &self.running {
            assert_eq!(*arrival, self.sequences[id].arrival, "`{id}` stands at its arrival");
        }
        for queue in [&self.waiting, &self.offered] {
            let needs = queue.ids().map(|id| self.sequences[&id].tokens());
            let demand: u64 = needs
                .map(|tokens| u64::from(tokens.div_ceil(self.config.block_size)))
                .sum();
            assert_eq!(queue.demand_blocks(), demand, "the blocks that a queue needs add up");
        }
        for id in self.exports.keys().chain(self.fenced.keys()) {
            assert!(
                !self.sequences.contains_key(id),
                "`{id}` has ended, so it is no request any more"
            );
        }
    }

    /// The host keeps what is being copied, and nothing else; who waits for it is alive, or its blocks are fenced.
    fn check_reloads(&self) {
        let mut expected: BTreeMap<BlockHash, u32> = BTreeMap::new();
        for hash in self.reloads.values().flatten() {
            *expected.entry(*hash).or_default() += 1;
        }
        let dump = self.cache.host().dump().into_iter();
        let locked: BTreeMap<BlockHash, u32> = dump.filter(|(_, locks)| *locks > 0).collect();
        assert_eq!(locked, expected, "the host keeps what is being copied");
        for id in self.reloads.keys() {
            assert!(
                self.reloading.contains(id) != self.fenced.contains_key(id),
                "`{id}` waits for its reload, or its blocks are fenced"
            );
        }
    }

    fn check_bounds(&self) {
        let config = &self.config;
        let placed = self.running.len() + self.importing.len() + self.reloading.len();
        assert!(placed <= config.max_running as usize, "no more run than may");
        let waiting = self.waiting.len() + self.offered.len();
        // Preempted requests come back whether there is room or not; there are no more of them than may run.
        assert!(
            waiting <= config.max_waiting.saturating_add(config.max_running),
            "no more wait than may"
        );
        let holding = self.exports.len() + self.fenced.len();
        assert!(
            holding <= config.kv_blocks as usize,
            "each export and fence holds a block"
        );
    }

    fn check_load(&self) {
        let mut load = Load::default();
        for sequence in self.sequences.values() {
            load.add(Load::of(sequence));
        }
        assert_eq!(self.load, load, "the load is the sum over the requests");
    }

    fn check_sequence(&self, sequence: &Sequence) {
        let id = sequence.id;
        let block_size = self.config.block_size;
        let holds = sequence.table.len() as u64 * u64::from(block_size);
        assert!(
            u64::from(sequence.computed) <= holds,
            "`{id}` has blocks for all of its KV"
        );
        assert!(
            sequence.named <= sequence.computed / block_size,
            "`{id}` names whole blocks only"
        );
        assert!(sequence.computed < sequence.tokens(), "`{id}` has a token to compute");
        let usage = &sequence.usage;
        let sources = usage.local_cached_tokens + usage.host_cached_tokens + usage.imported_tokens;
        assert!(sources <= sequence.counted, "`{id}` counts what it found");
        assert!(
            sequence.counted <= sequence.prompt.tokens,
            "`{id}` counts prompt tokens"
        );
        match sequence.phase {
            Phase::Waiting | Phase::Offered => assert!(sequence.table.is_empty(), "`{id}` waits without blocks"),
            Phase::Importing { first_block, .. } => {
                assert_eq!(
                    sequence.computed,
                    first_block * block_size,
                    "`{id}` locked whole blocks"
                );
                assert!(sequence.table.len() > first_block as usize, "`{id}` waits for a block");
            }
            Phase::Reloading {
                first_block,
                end_tokens,
            } => {
                assert_eq!(
                    sequence.computed,
                    first_block * block_size,
                    "`{id}` locked whole blocks"
                );
                assert!(u64::from(end_tokens) <= holds, "`{id}` has blocks for its reload");
            }
            Phase::Running => {}
            Phase::Ended => assert!(
                self.outstanding.is_some(),
                "ended `{id}` stays for the outstanding step only"
            ),
        }
    }

    /// A step's items belong to live requests whose KV reaches up to them and whose blocks cover them.
    fn check_outstanding(&self) {
        let Some(step) = &self.outstanding else { return };
        let tokens: u64 = step.items.iter().map(|item| u64::from(item.count)).sum();
        assert!(
            tokens <= u64::from(self.config.max_batch_tokens),
            "a step keeps its budget"
        );
        let mut seen = BTreeSet::new();
        for item in &step.items {
            let sequence = &self.sequences[&item.id];
            assert!(seen.insert(item.id), "`{}` stands once in a step", item.id);
            assert!(
                matches!(sequence.phase, Phase::Running | Phase::Ended),
                "`{}` is in a step",
                item.id
            );
            assert_eq!(sequence.computed, item.start, "`{}` goes on where it was", item.id);
            let end = item.start + item.count;
            let holds = sequence.table.len() as u64 * u64::from(self.config.block_size);
            assert!(u64::from(end) <= holds, "`{}` has blocks for the step", item.id);
        }
    }

    fn check_deadlines(&self) {
        let leases = self.exports.iter().map(|(id, held)| (held.lease_ends, *id));
        let imports = self.sequences.values().filter_map(|sequence| match sequence.phase {
            Phase::Importing { deadline, .. } => Some((deadline, sequence.id)),
            Phase::Waiting | Phase::Offered | Phase::Reloading { .. } | Phase::Running | Phase::Ended => None,
        });
        let expected: BTreeSet<_> = leases.chain(imports).collect();
        assert_eq!(self.deadlines, expected, "every lease and import has its deadline");
        for (id, held) in &self.exports {
            assert!(
                held.renewals <= self.config.export_renewals,
                "the lease of `{id}` was renewed `{}` times",
                held.renewals
            );
            assert!(
                held.lease_ends <= self.now + self.config.export_lease,
                "the lease of `{id}` ends within its length"
            );
        }
    }
}
