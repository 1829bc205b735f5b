//! Which session's KV goes when room is needed: by last use, or by what its return is worth.

use crate::driver::{Driver, small, tokens};
use homing_engine::api::{EngineConfig, EngineKind, Eviction, Input, Owner, Transfer};
use homing_kv::{BlockHash, hash_blocks};
use homing_units::{Duration, SessionId};

const EXPECTED: Eviction = Eviction::Expected {
    cost_doubles_after_tokens: None,
};
const SECOND: u64 = 1_000;

/// An engine with sessions, and what they have asked so far.
struct World {
    driver: Driver,
    requests: u64,
}

impl World {
    fn new(config: EngineConfig) -> Self {
        Self {
            driver: Driver::new(config),
            requests: 0,
        }
    }

    /// A request of a session, served at once.
    fn asks(&mut self, session: u64, kind: u8, prompt: &[u32]) {
        self.requests += 1;
        self.driver.owner = Some(Owner {
            session: SessionId(session),
            kind,
        });
        self.driver.submit(self.requests, prompt, 1, Transfer::None);
        self.driver.run();
    }

    /// One by somebody whom nobody knows.
    fn stranger_asks(&mut self, prompt: &[u32]) {
        self.requests += 1;
        self.driver.owner = None;
        self.driver.submit(self.requests, prompt, 1, Transfer::None);
        self.driver.run();
    }

    fn waits(&mut self, milliseconds: u64) {
        self.driver.now += Duration::from_millis(milliseconds);
        self.driver.input(Input::Timeout);
    }

    /// Sessions of this kind that all come back after so long, one after the other; or never, if it is `None`.
    fn learns(&mut self, kind: u8, gap: Option<u64>) {
        for index in 0..150 {
            let session = 1_000 * u64::from(kind) + index;
            let prompt = tokens(90, 5);
            self.asks(session, kind, &prompt);
            if let Some(gap) = gap {
                self.waits(gap);
                self.asks(session, kind, &prompt);
            }
        }
        // Those who are not back are seen to stay away.
        self.waits(3_600 * SECOND);
        self.driver.input(Input::ClearCache);
    }

    fn cached(&self, prompt: &[u32]) -> usize {
        self.driver.engine.cached_prefix(&names(prompt))
    }
}

fn names(prompt: &[u32]) -> Vec<BlockHash> {
    hash_blocks(prompt, 4)
}

/// Two sessions with 8 blocks each, the first of which left so many milliseconds before the second. Which blocks of them are left when 8
/// others are wanted, of a pool of 16, a little later.
fn left_of_two(config: EngineConfig, learnt: [Option<u64>; 2], apart: u64) -> [usize; 2] {
    let mut world = World::new(EngineConfig {
        max_batch_tokens: 64,
        ..config
    });
    world.learns(1, learnt[0]);
    world.learns(2, learnt[1]);
    let prompts = [tokens(1, 33), tokens(2, 33)];
    world.asks(1, 1, &prompts[0]);
    world.waits(apart);
    world.asks(2, 2, &prompts[1]);
    world.waits(SECOND / 2);
    world.stranger_asks(&tokens(3, 32));
    world.driver.assert_idle();
    [world.cached(&prompts[0]), world.cached(&prompts[1])]
}

#[test]
fn who_is_likely_to_return_survives_who_is_not() {
    let check = |config: EngineConfig, learnt, apart, expected: [usize; 2]| {
        let found = left_of_two(config.clone(), learnt, apart);
        assert_eq!(
            found, expected,
            "{:?} {:?} {learnt:?} apart {apart} ms",
            config.kind, config.eviction
        );
    };
    let lru = small(17);
    let expected = EngineConfig {
        eviction: EXPECTED,
        ..small(17)
    };
    // The second kind asks once.
    let once = [Some(10 * SECOND), None];
    check(lru.clone(), once, SECOND, [1, 8]);
    check(expected.clone(), once, SECOND, [8, 1]);
    // The second one has been used later, but is overdue already.
    let overdue = [Some(60 * SECOND), Some(SECOND / 10)];
    check(lru.clone(), overdue, 40 * SECOND, [1, 8]);
    check(expected.clone(), overdue, 40 * SECOND, [8, 1]);
    // Both come back, the one that left first is nearly due.
    let alike = [Some(60 * SECOND), Some(60 * SECOND)];
    check(expected.clone(), alike, 50 * SECOND, [8, 1]);
    // Now that one is the one that is overdue.
    check(expected.clone(), alike, 100 * SECOND, [1, 8]);
    // vLLM knows nothing of all this.
    let vllm = EngineConfig {
        kind: EngineKind::Vllm,
        ..expected
    };
    check(vllm, once, SECOND, [1, 8]);
}

#[test]
fn of_two_that_return_alike_the_one_that_is_cheaper_to_compute_goes() {
    let check = |cost_doubles_after_tokens, host_blocks, expected: [usize; 2]| {
        let mut world = World::new(EngineConfig {
            max_batch_tokens: 64,
            host_blocks,
            eviction: Eviction::Expected {
                cost_doubles_after_tokens,
            },
            ..small(25)
        });
        // Long ones first, so that they are the least recently used.
        let (long, short) = (tokens(1, 61), tokens(2, 21));
        world.asks(1, 1, &long);
        world.asks(2, 1, &short);
        world.stranger_asks(&tokens(3, 32));
        let found = [world.cached(&long), world.cached(&short)];
        assert_eq!(
            found, expected,
            "doubles after {cost_doubles_after_tokens:?}, {host_blocks} blocks of host memory"
        );
    };
    check(Some(16), 0, [15, 2]);
    check(None, 0, [12, 5]);
    // What comes back from host memory costs the same from wherever it comes.
    check(Some(16), 50, [12, 5]);
}

#[test]
fn what_a_session_has_superseded_goes_first() {
    let check = |eviction, expected: [usize; 3]| {
        let mut world = World::new(EngineConfig {
            max_batch_tokens: 64,
            eviction,
            ..small(25)
        });
        let other = tokens(1, 33);
        world.asks(1, 1, &other);
        // It rewrites its history behind the first 16 tokens: 4 blocks are shared, 4 of the old and 5 of the new are not.
        let before = tokens(2, 33);
        let after: Vec<u32> = tokens(2, 16).into_iter().chain(tokens(3, 21)).collect();
        world.asks(2, 1, &before);
        world.asks(2, 1, &after);
        world.stranger_asks(&tokens(4, 32));
        let found = [&other, &before, &after].map(|prompt| world.cached(prompt));
        assert_eq!(found, expected, "{eviction:?}");
    };
    check(EXPECTED, [8, 4, 9]);
    check(Eviction::Lru, [4, 8, 9]);
}

#[test]
fn what_goes_on_or_starts_anew_supersedes_nothing() {
    let left = |second: &[u32]| {
        let mut world = World::new(EngineConfig {
            max_batch_tokens: 64,
            eviction: EXPECTED,
            ..small(40)
        });
        let (first, other) = (tokens(2, 33), tokens(1, 33));
        world.asks(2, 1, &first);
        world.asks(2, 1, second);
        world.asks(1, 1, &other);
        // Wants more than is free, so that what was given up would go.
        let room = world.driver.engine.snapshot().blocks_free;
        world.stranger_asks(&tokens(5, 4 * room as usize + 2));
        world.cached(&first)
    };
    assert_eq!(left(&tokens(2, 41)), 8, "it goes on");
    assert_eq!(
        left(&tokens(3, 9)),
        7,
        "it starts anew; its first prompt is the least recently used"
    );
}

#[test]
fn a_running_request_is_retracted_last() {
    let mut world = World::new(EngineConfig {
        eviction: EXPECTED,
        ..small(16)
    });
    world.learns(1, Some(SECOND));
    let cherished = tokens(1, 21);
    world.asks(1, 1, &cherished);
    // Two that run and grow until nothing is left but what they use.
    world.driver.owner = None;
    for id in [9_001, 9_002] {
        world
            .driver
            .submit(id, &tokens(u32::try_from(id).expect("small"), 9), 40, Transfer::None);
    }
    let mut preempted_at = None;
    while world.driver.run_step() {
        if preempted_at.is_none() && world.driver.engine.snapshot().preemptions > 0 {
            preempted_at = Some(world.cached(&cherished));
        }
    }
    assert_eq!(
        preempted_at,
        Some(0),
        "whatever a cached block is worth, it goes before a request that runs"
    );
    world.driver.assert_idle();
}

#[test]
fn host_memory_keeps_who_is_likely_to_return() {
    let check = |eviction, expected: [usize; 2]| {
        let mut world = World::new(EngineConfig {
            max_batch_tokens: 64,
            host_blocks: 9,
            eviction,
            ..small(9)
        });
        world.learns(1, Some(10 * SECOND));
        world.learns(2, None);
        let prompts = [tokens(1, 33), tokens(2, 33), tokens(3, 33)];
        world.asks(1, 1, &prompts[0]);
        world.asks(2, 2, &prompts[1]);
        world.stranger_asks(&prompts[2]);
        let on_host = |prompt: &Vec<u32>| {
            names(prompt)
                .iter()
                .filter(|name| world.driver.host.contains(name))
                .count()
        };
        let found = [on_host(&prompts[0]), on_host(&prompts[1])];
        assert_eq!(found, expected, "{eviction:?}");
    };
    check(Eviction::Lru, [1, 8]);
    check(EXPECTED, [8, 1]);
}
