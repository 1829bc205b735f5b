//! `peer-vllm-hash`: session affinity by consistent hashing, as vLLM's own routers do it. No load and no cache is looked at.
//!
//! Source: vllm-project/router, `src/policies/consistent_hash.rs` and `hash_key.rs`, `src/routers/http/vllm_pd_router.rs`, main
//! branch as stored in 2026; vllm-project/production-stack's session router is the same idea.
//!
//! ```text
//! ring:   virtual_nodes points for each worker, at hash(worker, index)
//! owner:  the worker of the first point at or after hash(key), around the end of the ring
//! key:    the session's id (header `x-session-id`, or a field of the body), else the body's hash
//! chosen: the owner; if it is not healthy, the first healthy worker
//! ```
//!
//! A cluster with prefill-only workers: a ring of prefill workers and a ring of decode workers, the same key on both. Each turn
//! is prefilled apart: without a prefix of its own on the decode worker's side there is nothing to decide.
//!
//! | parameter | default | meaning |
//! | --- | --- | --- |
//! | `virtual_nodes` | 160 | points of each worker on the ring, 1 to 4096 |
//! | `key` | `session` | what is hashed: `session`; `prefix`, the first 256 tokens, which all sessions of an agent may share; `request`, as where a client names no session: a body that grows each turn hashes anew each turn |
//! | `fallback` | `first` | for an owner that is not healthy: the `first` healthy worker, as there, or the `next` one on the ring |
//!
//! Not faithful, and why:
//! - The hash is XXH3 over ids, theirs is Facebook's furc hash over URLs and header texts: other places on the ring, the same law.
//! - The session is the one that the router recognises, whether or not the client names it, which can only help.
//! - `prefix` is the `prefix_hash` of SGLang's gateway, of which vLLM's router is a fork, in whole blocks.
//! - The ring has all workers of a role, dead ones too, until they leave, as there. A worker that failed a request before
//!   counts as not healthy for it.
//! - Five tries, the fork's default, with the router's own pauses. Where no prefill worker is left it answers with an error at
//!   once there; here the turn waits for one, as long as the router lets it.

use super::pools::{Cost, Pools, Ranked, alone, alone_denied, prefill_denied, ranked, seed_denied, seeded};
use crate::admission::Denied;
use crate::event::Role;
use crate::policies::spec::Parameters;
use crate::policies::{Admission, Board, Choice, Habits, Policy, PolicyError, TurnView, WorkerView};
use homing_units::WorkerId;
use xxhash_rust::xxh3::xxh3_64;

/// Tries of a request.
const ATTEMPTS: u32 = 5;
/// The most points of a worker: above, a ring of a large fleet is megabytes for no better balance.
const POINTS_MAX: u32 = 4_096;

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VllmHashConfig {
    virtual_nodes: u32,
    key: Key,
    /// An owner that is not healthy is replaced by the next on the ring and not by the first of all.
    next: bool,
}

/// What is hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Session,
    Prefix,
    Request,
}

impl VllmHashConfig {
    pub(super) fn parse(parameters: &mut Parameters<'_>) -> Result<Self, PolicyError> {
        let virtual_nodes = parameters.whole("virtual_nodes", 160)?;
        if !(1..=POINTS_MAX).contains(&virtual_nodes) {
            return Err(PolicyError::BadValue {
                policy: "peer-vllm-hash".to_owned(),
                key: "virtual_nodes".to_owned(),
                value: virtual_nodes.to_string(),
                expected: "a whole number from 1 to 4096",
            });
        }
        let words = ["session", "prefix", "request"];
        let key = match parameters.choice("key", "`session`, `prefix` or `request`", &words)? {
            "prefix" => Key::Prefix,
            "request" => Key::Request,
            _ => Key::Session,
        };
        Ok(Self {
            virtual_nodes,
            key,
            next: parameters.choice("fallback", "`first` or `next`", &["first", "next"])? == "next",
        })
    }
}

impl Key {
    /// Where a turn belongs on a ring.
    fn point(self, turn: &TurnView) -> u64 {
        match (self, turn.prefix) {
            (Self::Session, _) => hash(0, &turn.session.0.to_le_bytes()),
            (Self::Prefix, Some((_, prefix))) => hash(1, &prefix.0.to_le_bytes()),
            // A prompt without a whole block has no prefix to speak of.
            (Self::Prefix, None) | (Self::Request, _) => hash(2, &turn.request.0.to_le_bytes()),
        }
    }
}

/// The points of a role's workers, in order.
#[derive(Debug, Default)]
struct Ring {
    workers: Vec<WorkerId>,
    points: Vec<(u64, WorkerId)>,
}

impl Ring {
    /// Makes the ring anew if other workers are to be on it.
    fn keep_up(&mut self, workers: Vec<WorkerId>, virtual_nodes: u32) {
        if self.workers == workers {
            return;
        }
        let point = |worker: WorkerId, index: u32| {
            let place = [worker.0.to_le_bytes(), index.to_le_bytes()].concat();
            (hash(3, &place), worker)
        };
        let points = workers
            .iter()
            .flat_map(|worker| (0..virtual_nodes).map(|index| point(*worker, index)));
        self.points = points.collect();
        self.points.sort_unstable();
        self.workers = workers;
    }

    /// The points from a place on, around to it.
    fn from(&self, place: u64) -> impl Iterator<Item = WorkerId> + '_ {
        let start = self.points.partition_point(|(point, _)| *point < place);
        let (before, after) = self.points.split_at(start);
        after.iter().chain(before).map(|(_, worker)| *worker)
    }

    /// The workers from a place on, each once.
    fn in_order(&self, place: u64) -> Vec<WorkerId> {
        let mut order: Vec<WorkerId> = Vec::new();
        for worker in self.from(place) {
            if !order.contains(&worker) {
                order.push(worker);
                if order.len() == self.workers.len() {
                    break;
                }
            }
        }
        order
    }
}

/// The policy.
#[derive(Debug)]
pub(super) struct VllmHash {
    config: VllmHashConfig,
    prefill: Ring,
    decode: Ring,
}

impl VllmHash {
    pub(super) fn new(config: VllmHashConfig) -> Self {
        Self {
            config,
            prefill: Ring::default(),
            decode: Ring::default(),
        }
    }

    /// A pool from the owner on; the cost is how far down a worker is.
    fn rank<'b>(
        &self,
        ring: &Ring,
        turn: &TurnView,
        pool: &[&'b WorkerView],
        denied: fn(&WorkerView) -> Option<Denied>,
    ) -> Vec<Ranked<'b>> {
        let place = self.config.key.point(turn);
        let order = if self.config.next {
            ring.in_order(place)
        } else {
            let owner = ring.from(place).next();
            let others = ring.workers.iter().copied().filter(|worker| Some(*worker) != owner);
            owner.into_iter().chain(others).collect()
        };
        ranked(turn, pool, denied, |worker| {
            let down = order.iter().position(|other| *other == worker.id);
            Cost::of(down.unwrap_or(order.len()) as f64)
        })
    }
}

impl Policy for VllmHash {
    fn choose(&mut self, board: &Board, turn: &TurnView) -> Choice {
        let of = |decodes: bool| -> Vec<WorkerId> {
            let side = board
                .workers
                .iter()
                .filter(|worker| (worker.role != Role::Prefill) == decodes);
            side.map(|worker| worker.id).collect()
        };
        self.prefill.keep_up(of(false), self.config.virtual_nodes);
        self.decode.keep_up(of(true), self.config.virtual_nodes);
        let pools = Pools::of(board);
        if !pools.disaggregated {
            let candidates = self.rank(&self.decode, turn, &pools.decode, alone_denied);
            return alone(turn, &candidates, "its place on the ring");
        }
        let prefills = self.rank(&self.prefill, turn, &pools.prefill, prefill_denied);
        let decodes = self.rank(&self.decode, turn, &pools.decode, seed_denied);
        seeded(turn, &prefills, &decodes, "its places on the rings")
    }

    fn habits(&self) -> Habits {
        Habits {
            admission: Admission::AtOnce,
            attempts: Some(ATTEMPTS),
            ..Habits::default()
        }
    }
}

/// The hash of something of a kind.
fn hash(kind: u8, value: &[u8]) -> u64 {
    let mut bytes = vec![kind];
    bytes.extend_from_slice(value);
    xxh3_64(&bytes)
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{board, turn, with_parameters};
    use super::*;
    use crate::action::Path;
    use homing_kv::BlockHash;
    use homing_units::{RequestId, SessionId};
    use std::collections::BTreeMap;

    const PD: [Role; 5] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode, Role::Decode];

    fn policy(text: &str) -> VllmHash {
        with_parameters(text, |parameters| VllmHashConfig::parse(parameters).map(VllmHash::new))
    }

    fn of_session(session: u64) -> TurnView {
        TurnView {
            session: SessionId(session),
            request: RequestId(1_000 + session),
            ..turn()
        }
    }

    fn goes<const N: usize>(text: &str, roles: [Role; N], turn: &TurnView, set: impl FnOnce(&mut Board)) -> Choice {
        let mut board = board(roles);
        set(&mut board);
        policy(text).choose(&board, turn)
    }

    /// The owners of some places on a ring of three workers with points at 100 (worker 0), 200 (1), 300 (2) and 400 (0).
    #[track_caller]
    fn check(place: u64, expected: [u32; 3]) {
        let ids = [0, 1, 2].map(WorkerId);
        let ring = Ring {
            workers: ids.to_vec(),
            points: vec![(100, ids[0]), (200, ids[1]), (300, ids[2]), (400, ids[0])],
        };
        let order: Vec<_> = ring.in_order(place).iter().map(|worker| worker.0).collect();
        assert_eq!(order, expected, "{place}");
        assert_eq!(ring.from(place).next(), Some(WorkerId(expected[0])), "{place}");
    }

    #[test]
    fn the_owner_is_the_first_at_or_after_a_place() {
        check(0, [0, 1, 2]);
        check(100, [0, 1, 2]);
        check(101, [1, 2, 0]);
        check(200, [1, 2, 0]);
        check(201, [2, 0, 1]);
        check(301, [0, 1, 2]);
        check(400, [0, 1, 2]);
        // Around the end.
        check(401, [0, 1, 2]);
        check(u64::MAX, [0, 1, 2]);
    }

    #[test]
    fn a_session_stays_whatever_the_load_and_the_cache() {
        for session in 0..50 {
            let first = goes("", [Role::Both; 4], &of_session(session), |_| {}).plan;
            let loaded = |board: &mut Board| {
                for worker in &mut board.workers {
                    worker.account.requests = 500 * (4 - worker.id.0);
                    worker.resident_tokens = 5_000 * worker.id.0;
                }
            };
            let later = TurnView {
                request: RequestId(9),
                ..of_session(session)
            };
            assert_eq!(goes("", [Role::Both; 4], &later, loaded).plan, first, "{session}");
        }
    }

    #[test]
    fn sessions_spread_and_few_move_when_a_worker_joins() {
        let spread = |workers: usize| -> BTreeMap<u64, u32> {
            let mut policy = policy("");
            let eight = board([Role::Both; 8]);
            let board = Board {
                workers: eight.workers[..workers].to_vec(),
                ..eight
            };
            let went = (0..4_000).map(|session| {
                let plan = policy.choose(&board, &of_session(session)).plan.unwrap();
                (session, plan.decode.0)
            });
            went.collect()
        };
        let (seven, eight) = (spread(7), spread(8));
        // 4,000 / 8 = 500 each, with 160 points each within a quarter or so.
        let mut counts = [0; 8];
        eight.values().for_each(|worker| counts[*worker as usize] += 1);
        assert!(counts.iter().all(|count| (350..650).contains(count)), "{counts:?}");
        let moved: Vec<_> = seven
            .iter()
            .filter(|(session, worker)| eight[session] != **worker)
            .collect();
        assert!(
            moved.iter().all(|(session, _)| eight[session] == 7),
            "only to the new one"
        );
        assert_eq!(moved.len(), counts[7], "and all of its are such");
        // One that sees the fleet grow and shrink does as one that never saw it otherwise.
        let mut lasting = policy("");
        for (workers, expected) in [(7, &seven), (8, &eight), (7, &seven)] {
            let mut fleet = board([Role::Both; 8]);
            fleet.workers.truncate(workers);
            let mut went = (0..100).map(|session| {
                (
                    session,
                    lasting.choose(&fleet, &of_session(session)).plan.unwrap().decode.0,
                )
            });
            assert!(went.all(|(session, worker)| expected[&session] == worker));
        }
    }

    #[test]
    fn an_owner_that_is_not_healthy_is_replaced() {
        let owner = |session| {
            goes("", [Role::Both; 4], &of_session(session), |_| {})
                .plan
                .unwrap()
                .decode
                .0
        };
        let mut nexts = std::collections::BTreeSet::new();
        for session in 0..200 {
            let owner = owner(session);
            let sick = |board: &mut Board| board.workers[owner as usize].denies_alone = Some(Denied::Suspect);
            let first = goes("", [Role::Both; 4], &of_session(session), sick)
                .plan
                .unwrap()
                .decode
                .0;
            assert_eq!(first, u32::from(owner == 0), "the first healthy one");
            let dead = |board: &mut Board| board.workers[owner as usize].denies_alone = Some(Denied::Dead);
            let next = goes("fallback=next", [Role::Both; 4], &of_session(session), dead)
                .plan
                .unwrap()
                .decode
                .0;
            assert_ne!(next, owner);
            nexts.insert((owner, next));
        }
        assert_eq!(nexts.len(), 4 * 3, "on the ring a worker's sessions go to all others");
        let all = |board: &mut Board| {
            board
                .workers
                .iter_mut()
                .for_each(|worker| worker.denies_alone = Some(Denied::Suspect));
        };
        assert_eq!(goes("", [Role::Both; 4], &of_session(0), all).plan, None);
    }

    #[test]
    fn what_is_hashed() {
        let at = |text: &str, turn: TurnView| goes(text, [Role::Both; 8], &turn, |_| {}).plan.unwrap().decode.0;
        let with = |session, request, prefix: u128| TurnView {
            session: SessionId(session),
            request: RequestId(request),
            prefix: Some((BlockHash(7), BlockHash(prefix))),
            ..turn()
        };
        let differ = |text: &str, make: &dyn Fn(u64) -> TurnView| {
            let places: std::collections::BTreeSet<_> = (0..50).map(|index| at(text, make(index))).collect();
            places.len() > 1
        };
        assert!(differ("", &|session| with(session, 1, 1)));
        assert!(!differ("", &|request| with(1, request, u128::from(request))));
        assert!(differ("key=prefix", &|prefix| with(1, 1, u128::from(prefix))));
        assert!(!differ("key=prefix", &|session| with(session, session, 1)));
        assert!(differ("key=request", &|request| with(1, request, 1)));
        assert!(!differ("key=request", &|session| with(session, 1, u128::from(session))));
        // No whole block, no prefix: each request anew.
        let none = |request| TurnView {
            prefix: None,
            ..with(1, request, 1)
        };
        assert!(differ("key=prefix", &none));
    }

    #[test]
    fn prefill_and_decode_workers_have_rings_of_their_own() {
        let mut pairs = std::collections::BTreeSet::new();
        for session in 0..100 {
            let plan = goes("", PD, &of_session(session), |_| {}).plan.unwrap();
            assert_eq!(plan.path, Path::Seed);
            pairs.insert((plan.prefill.unwrap().0, plan.decode.0));
        }
        assert_eq!(pairs.len(), 2 * 3);
        let gone = |board: &mut Board| {
            board.workers[0].denies_prefill = Some(Denied::Dead);
            board.workers[1].denies_prefill = Some(Denied::Dead);
        };
        assert_eq!(goes("", PD, &of_session(0), gone).plan, None);
    }

    #[test]
    fn it_has_at_least_one_point_and_a_bounded_number() {
        let refused = |text: &str| {
            let error = format!("peer-vllm-hash:virtual_nodes={text}")
                .parse::<crate::policies::PolicySpec>()
                .unwrap_err();
            error.to_string()
        };
        for text in ["0", "4097"] {
            assert_eq!(
                refused(text),
                format!(
                    "parameter `virtual_nodes` of policy `peer-vllm-hash` is `{text}`, expected a whole number from 1 to 4096"
                )
            );
        }
        assert_eq!(policy("virtual_nodes=1").config.virtual_nodes, 1);
        assert_eq!(policy("").habits().attempts, Some(5));
        assert_eq!(policy("").habits().admission, Admission::AtOnce);
    }
}
