//! Everything at once: turns, answers, late answers, failures, lost and reborn workers, lossy KV events, clients that go,
//! clocks that run out, in an order drawn from a seed. After each event the parts agree; each request ends exactly once; at
//! the end nothing is booked, the index is what the workers hold, and a replay of the recording does the same again.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use homing_kv::{BlockHash, Prompt, Tier};
use homing_router::action::WorkerState;
use homing_router::event::{
    Abilities, Compared, Event, FailureCause, HealthReport, KvBatch, KvUpdate, Leg, LegId, LegUsage, PromptId, Resume,
    Role, SessionHint, WorkerInfo,
};
use homing_router::recording::replay;
use homing_router::{Limits, RouterConfig};
use homing_units::{BootEpoch, Duration, RequestId, Rng, rng_for};
use proptest::prelude::*;
use rand::seq::IndexedRandom as _;
use std::collections::BTreeSet;
use support::{Driver, prompt};

/// A worker as it really is.
struct Engine {
    info: WorkerInfo,
    alive: bool,
    cached: BTreeSet<BlockHash>,
    log: Vec<KvBatch>,
    /// Batches that were sent and have not arrived.
    wire: Vec<KvBatch>,
}

struct World {
    driver: Driver,
    engines: Vec<Engine>,
    rng: Rng,
    /// Whether messages are lost and workers die.
    faults: bool,
}

impl World {
    fn new(seed: u64, policy: &str, roles: &[Role]) -> Self {
        let engine = |(id, role): (u32, &Role)| Engine {
            info: WorkerInfo {
                kv_tokens: 4_000,
                kv_events: id % 3 != 2,
                abilities: Abilities {
                    // Of the decode workers of some worlds all, of others some need a prefill worker for each turn.
                    prefills_alone: match seed % 3 {
                        0 => true,
                        1 => *role != Role::Decode || id % 2 == 1,
                        _ => *role != Role::Decode,
                    },
                    ..Abilities::default()
                },
                ..support::worker(id, *role)
            },
            alive: true,
            cached: BTreeSet::new(),
            log: Vec::new(),
            wire: Vec::new(),
        };
        let engines: Vec<_> = (0..).zip(roles).map(engine).collect();
        let limits = Limits {
            queue: 6,
            requests: 16,
            sessions: 12,
            session_blocks: 900,
            predictions: 4,
            held_batches: 5,
            ..Limits::default()
        };
        let config = RouterConfig {
            seed,
            limits,
            ..RouterConfig::default()
        };
        let infos: Vec<_> = engines.iter().map(|engine| engine.info.clone()).collect();
        let driver = Driver::with_config(policy, config, &infos);
        Self {
            driver,
            engines,
            rng: rng_for(seed, "chaos"),
            faults: true,
        }
    }

    fn pick<T: Copy>(&mut self, from: impl IntoIterator<Item = T>) -> Option<T> {
        from.into_iter().collect::<Vec<_>>().choose(&mut self.rng).copied()
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.rng.random_range(0..100) < percent
    }

    /// One thing happens.
    fn step(&mut self) {
        let passed = Duration::from_millis(self.rng.random_range(0..400));
        self.driver.wait(passed);
        match self.rng.random_range(0..100) {
            0..20 => self.turn(),
            20..50 => self.answer(),
            50..58 => self.fail(),
            58..64 => self.late(),
            64..68 => self.client_leaves(),
            68..72 => self.life(),
            72..86 => self.events(),
            86..90 => self.answer_resync(),
            90..94 => self.answer_cancel(),
            _ => {
                self.driver.time_out();
            }
        }
    }

    fn turn(&mut self) {
        let conversation = self.rng.random_range(0..9_u64);
        let hint = if conversation < 3 {
            SessionHint::Explicit(u128::from(conversation))
        } else {
            SessionHint::Recognise
        };
        let (shared, own) = (self.rng.random_range(0..40), self.rng.random_range(0..100));
        let most = self.rng.random_range(0..300);
        // Some grow too long for any worker.
        let own = if self.chance(3) { 400 } else { own };
        // A driver may compare tokens, and may be wrong about what the router remembers.
        let compared = self.chance(50).then(|| Compared {
            prompt: PromptId(self.rng.random_range(0..60)),
            continues: self.chance(70).then(|| PromptId(self.rng.random_range(0..60))),
        });
        let prompt = prompt(conversation, shared, own);
        self.driver.compared_turn(hint, prompt, compared, most);
    }

    /// A leg is answered as it should be.
    fn answer(&mut self) {
        let Some(leg) = self.pick(self.driver.legs.keys().copied().collect::<Vec<_>>()) else {
            return;
        };
        match leg.leg {
            Leg::Lend | Leg::Fetch | Leg::Prefill => self.driver.leg_done(leg),
            Leg::Decode if self.chance(50) => self.driver.first_token(leg),
            Leg::Decode => {
                let cached = self.chance(50).then(|| self.rng.random_range(0..4_000));
                self.driver.finished(leg, cached);
            }
        }
    }

    fn fail(&mut self) {
        let Some(mut leg) = self.pick(self.driver.legs.keys().copied().collect::<Vec<_>>()) else {
            return;
        };
        if leg.leg == Leg::Prefill && self.chance(30) {
            // The decode leg was sent along.
            leg.leg = Leg::Decode;
        }
        use FailureCause::{Busy, Engine, Invalid, Transfer, Unreachable};
        let cause = *[Busy, Busy, Transfer, Transfer, Engine, Unreachable, Invalid]
            .choose(&mut self.rng)
            .unwrap();
        self.fail_with(leg, cause);
    }

    fn fail_with(&mut self, leg: LegId, cause: FailureCause) {
        let resume = if self.driver.live[&leg.request].sent && self.chance(20) {
            Resume::Impossible
        } else {
            self.driver.resume(leg.request)
        };
        let resume = if leg.leg == Leg::Decode { resume } else { Resume::Start };
        self.driver.failed(leg, cause, resume);
    }

    /// An answer of a leg that was given up, or of none that ever was.
    fn late(&mut self) {
        let leg = self.pick(self.driver.late.clone()).unwrap_or(LegId {
            request: RequestId(3),
            attempt: 77,
            leg: Leg::Decode,
        });
        // First whatever is due at this moment; what the late answer does then is its own doing.
        self.driver.tell(Event::Timeout);
        let resumes = self.driver.cancelled.contains(&leg);
        let event = match self.rng.random_range(0..3) {
            0 => Event::PrefillDone {
                leg: LegId {
                    leg: Leg::Prefill,
                    ..leg
                },
                cached_tokens: Some(9),
            },
            1 if !resumes => Event::FirstToken { leg },
            _ if !resumes => Event::Finished {
                leg,
                usage: LegUsage::default(),
            },
            _ => return,
        };
        let before = self.driver.digest.checkpoint(0);
        self.driver.tell(event);
        assert_eq!(
            self.driver.digest.checkpoint(0),
            before,
            "a late answer has led to actions"
        );
    }

    fn client_leaves(&mut self) {
        if let Some(request) = self.pick(self.driver.live.keys().copied().collect::<Vec<_>>()) {
            self.driver.client_gone(request);
        }
    }

    /// A worker dies, is reborn, joins again, leaves, or is probed.
    fn life(&mut self) {
        let index = self.rng.random_range(0..self.engines.len());
        let engine = &mut self.engines[index];
        let worker = engine.info.id;
        let event = match self.rng.random_range(0..6) {
            0 => {
                engine.alive = false;
                Event::Health(HealthReport {
                    worker,
                    epoch: None,
                    alive: false,
                })
            }
            1 => {
                engine.reborn();
                Event::Health(HealthReport {
                    worker,
                    epoch: Some(engine.info.epoch),
                    alive: true,
                })
            }
            2 => {
                engine.reborn();
                Event::WorkerJoined(engine.info.clone())
            }
            3 => Event::WorkerLeft(worker),
            4 => Event::KvRestarted {
                worker,
                epoch: engine.info.epoch,
            },
            _ => {
                let epoch = engine.alive.then_some(engine.info.epoch);
                Event::Health(HealthReport {
                    worker,
                    epoch,
                    alive: engine.alive,
                })
            }
        };
        let left = matches!(event, Event::WorkerLeft(_));
        self.driver.tell(event);
        if left {
            self.engines[index].reborn();
            let joined = Event::WorkerJoined(self.engines[index].info.clone());
            self.driver.tell(joined);
        }
    }

    /// A worker's cache changes, and batches arrive, or not.
    fn events(&mut self) {
        let index = self.rng.random_range(0..self.engines.len());
        if !self.engines[index].info.kv_events {
            return;
        }
        let stores = self.chance(60);
        let (conversation, own) = (self.rng.random_range(0..9), self.rng.random_range(1..60));
        self.engines[index].change(stores, &prompt(conversation, 20, own), own as usize);
        while let Some(batch) = self.engines[index].wire.pop() {
            if self.faults && self.chance(15) {
                continue;
            }
            if self.faults && self.chance(20) {
                self.engines[index].wire.insert(0, batch);
                break;
            }
            self.driver.tell(Event::Kv(batch.clone()));
            if self.faults && self.chance(10) {
                self.driver.tell(Event::Kv(batch));
            }
        }
    }

    fn answer_resync(&mut self) {
        let Some((worker, from)) = self.driver.resyncs.pop() else {
            return;
        };
        let complete = !self.faults || self.chance(60);
        let engine = &self.engines[worker.0 as usize];
        let missed = if complete { 0 } else { engine.log.len() / 2 };
        let batches: Vec<_> = engine
            .log
            .iter()
            .skip(missed)
            .filter(|batch| batch.sequence >= from)
            .cloned()
            .collect();
        for batch in batches {
            self.driver.tell(Event::Kv(batch));
        }
        self.driver.tell(Event::ResyncDone { worker, complete });
    }

    fn answer_cancel(&mut self) {
        if let Some(leg) = self.driver.cancelled.pop() {
            self.fail_with(leg, FailureCause::Engine);
        }
    }

    /// Faults stop, and all that is open comes to an end.
    fn settle(&mut self) {
        self.faults = false;
        for index in 0..self.engines.len() {
            let engine = &mut self.engines[index];
            if !engine.alive {
                engine.reborn();
            }
            let epoch = Some(engine.info.epoch);
            let event = Event::Health(HealthReport {
                worker: engine.info.id,
                epoch,
                alive: true,
            });
            self.driver.tell(event);
        }
        for _ in 0..2_000 {
            self.answer_resync();
            self.answer_cancel();
            self.answer();
            if self.driver.legs.is_empty() && self.driver.cancelled.is_empty() {
                self.driver.time_out();
            }
            if self.driver.live.is_empty()
                && self.driver.resyncs.is_empty()
                && self.driver.router.poll_timeout().is_none()
            {
                return;
            }
        }
        panic!("not settled: {:?}", self.driver.live.keys().collect::<Vec<_>>());
    }

    /// After faults have stopped and one more event of each worker has come: whoever is exact is known exactly.
    fn assert_converged(&mut self) {
        for index in 0..self.engines.len() {
            if !self.engines[index].info.kv_events {
                continue;
            }
            self.engines[index].wire.clear();
            self.engines[index].change(true, &prompt(1, 20, 5), 5);
            let batch = self.engines[index].wire.pop().expect("a change makes a batch");
            self.driver.tell(Event::Kv(batch));
            while !self.driver.resyncs.is_empty() {
                self.answer_resync();
            }
            let engine = &self.engines[index];
            let view = &self.driver.router.view_workers()[index];
            let held = u32::try_from(engine.cached.len()).unwrap();
            match view.state {
                WorkerState::Exact => assert_eq!(view.indexed_gpu_blocks, held, "w{index} is known exactly"),
                WorkerState::Degraded => assert!(view.indexed_gpu_blocks <= held, "w{index}: what is known is true"),
                WorkerState::Suspect | WorkerState::Dead => panic!("w{index} is alive"),
            }
        }
    }
}

impl Engine {
    fn reborn(&mut self) {
        self.alive = true;
        self.info.epoch = BootEpoch(self.info.epoch.0 + 1);
        self.cached.clear();
        self.log.clear();
        self.wire.clear();
    }

    fn change(&mut self, stores: bool, prompt: &Prompt, keep: usize) {
        let update = if stores {
            self.cached.extend(prompt.blocks.iter());
            KvUpdate::Stored {
                parent: None,
                hashes: prompt.blocks.to_vec(),
                tier: Tier::Gpu,
            }
        } else {
            let hashes = prompt.blocks[prompt.blocks.len() - keep..].to_vec();
            hashes.iter().for_each(|hash| {
                self.cached.remove(hash);
            });
            KvUpdate::Removed {
                hashes,
                tier: Tier::Gpu,
            }
        };
        let sequence = self.log.len() as u64;
        let batch = KvBatch {
            worker: self.info.id,
            epoch: self.info.epoch,
            sequence,
            updates: vec![update],
        };
        self.log.push(batch.clone());
        self.wire.push(batch);
    }
}

/// Runs one world; what came of it.
fn run(seed: u64, policy: &str, roles: &[Role], steps: usize) -> World {
    let mut world = World::new(seed, policy, roles);
    for _ in 0..steps {
        world.step();
    }
    world.settle();
    world.assert_converged();
    assert!(world.driver.router.idle(), "something stays booked");
    assert_eq!(
        world.driver.ended.len(),
        usize::try_from(world.driver.ended.last_key_value().map_or(0, |(id, _)| id.0 + 1)).unwrap()
    );
    world.driver.recorder.finish();
    world.driver.bytes.extend(world.driver.recorder.take_bytes());
    world
}

/// All policies, and those with more to go wrong once more with their knobs turned.
fn policies() -> Vec<&'static str> {
    let turned = [
        "kv-aware:backpressure=on:reject_threshold=2:soft_cap=2:seed_min_turn=2:prefill=healthy:request_timeout=3",
        "lazy-migration:trigger=recent_ttft:ttft=0.1:heavy_threshold=100:margin=0",
        "sticky:sticky_bonus=1",
        FETCHING,
    ];
    homing_router::policies::names().chain(turned).collect()
}

/// A policy for which a short tail is heavy and a short history worth fetching.
const FETCHING: &str = "homing:append_tokens=100:local_tokens=0:fetch_s=0";

fn clusters() -> impl Strategy<Value = Vec<Role>> {
    use Role::{Both, Decode, Prefill};
    prop_oneof![
        Just(vec![Both; 3]),
        Just(vec![Prefill, Prefill, Decode, Decode, Decode]),
        Just(vec![Prefill, Both, Decode]),
        Just(vec![Both]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn every_request_ends_once_and_nothing_stays(
        seed in any::<u64>(),
        policy in prop::sample::select(policies()),
        roles in clusters(),
        steps in 20..300_usize,
    ) {
        let world = run(seed, policy, &roles, steps);
        let done = replay(&world.driver.bytes, |_, _, _, router| router.check_invariants()).unwrap();
        prop_assert!(done.complete);
        prop_assert_eq!(done.reached, world.driver.digest.checkpoint(done.reached.events), "seed {}", seed);
    }
}

/// A turn paused until its own time was up, and was overdue as it was sent: that was left to a timeout of the same instant.
#[test]
fn a_turn_that_is_overdue_as_it_is_sent_ends_at_once() {
    let policy =
        "kv-aware:backpressure=on:reject_threshold=2:soft_cap=2:seed_min_turn=2:prefill=healthy:request_timeout=3";
    run(
        13_195_319_447_090_043_509,
        policy,
        &[Role::Prefill, Role::Both, Role::Decode],
        150,
    );
}

#[test]
fn one_seed_twice_is_the_same_bytes() {
    let roles = [Role::Prefill, Role::Both, Role::Decode];
    let [one, two] = [0, 1].map(|_| run(11, "homing", &roles, 600).driver.bytes);
    assert!(
        one == two && one.len() > 10_000,
        "{} and {} bytes",
        one.len(),
        two.len()
    );
    assert_ne!(one, run(12, "homing", &roles, 600).driver.bytes);
}

/// The chaos does what it should: each way to end is seen, and each path.
#[test]
fn all_is_seen() {
    let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode, Role::Both];
    let (mut ends, mut paths) = (BTreeSet::new(), BTreeSet::new());
    for seed in 0..24 {
        let world = run(
            seed,
            if seed % 2 == 0 {
                "homing"
            } else {
                "homing:local_tokens=0"
            },
            &roles,
            300,
        );
        ends.extend(world.driver.ended.values().copied());
        paths.extend(world.driver.decisions.iter().map(|decision| decision.path.as_str()));
    }
    for end in [
        "finished",
        "client_gone",
        "context_too_long",
        "overloaded",
        "transfer_failed",
        "worker_lost",
        "refused",
    ] {
        assert!(ends.contains(end), "{end} is missing in {ends:?}");
    }
    for path in ["append", "seed", "reseed", "local"] {
        assert!(paths.contains(path), "{path} is missing in {paths:?}");
    }
    let fetches = (0..6).map(|seed| {
        let world = run(seed, FETCHING, &roles, 300);
        world
            .driver
            .decisions
            .iter()
            .filter(|decision| decision.fetch.is_some())
            .count()
    });
    assert!(fetches.sum::<usize>() > 20, "histories are fetched");
}

/// The only prefill worker had failed the turns, and a policy that prefills nowhere else waited for another until their
/// patience was over.
#[test]
fn a_turn_goes_back_to_the_only_worker_of_a_kind_that_failed_it() {
    let roles = [Role::Prefill, Role::Both, Role::Decode];
    run(6_670_735_896_129_080_340, "peer-sglang", &roles, 144);
}
