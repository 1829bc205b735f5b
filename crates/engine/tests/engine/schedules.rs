//! Random schedules over tiny pools: whatever arrives in whatever order, every request ends once, with the right KV under
//! it, and nothing is left behind. The driver checks each output and the engine's invariants after each input.

use crate::driver::{Driver, small, tokens};
use homing_engine::api::{
    EngineConfig, EngineKind, Eviction, ImportError, Input, Owner, SlotConfig, Transfer, TrimRule,
};
use homing_units::{Duration, RequestId, SessionId};
use proptest::prelude::*;

/// More rounds than it takes to serve what a schedule leaves behind.
const MAX_ROUNDS: u32 = 2_000;

#[derive(Clone, Debug)]
enum Operation {
    Submit(Turn),
    /// Requests that arrive together.
    Burst(Vec<Turn>),
    Step,
    /// A step whose driver forgets the samples of every second request.
    ForgetfulStep,
    Abort(usize),
    ImportDone(usize, bool),
    ReloadDone(usize),
    Ack(usize),
    Release(usize),
    Renew(usize),
    Wait(u64),
    ClearCache,
}

#[derive(Clone, Debug)]
struct Turn {
    base: u32,
    /// Tokens of the base; what follows is this request's own.
    shared: usize,
    own: usize,
    /// Go on from an earlier request's prompt and output, as an agent's next turn does.
    follows: Option<usize>,
    max_output: u32,
    stop_after: u32,
    transfer: Kind,
    session: u64,
    /// The engine is told whose it is.
    owned: bool,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Plain,
    Export,
    /// Tenths of the prompt that are on offer.
    Import(u32),
}

fn turn() -> impl Strategy<Value = Turn> {
    let kind = prop_oneof![
        3 => Just(Kind::Plain),
        2 => Just(Kind::Export),
        3 => (0_u32..=10).prop_map(Kind::Import),
    ];
    (
        0_u32..3,
        0_usize..24,
        0_usize..12,
        proptest::option::of(0_usize..20),
        1_u32..14,
        1_u32..20,
        kind,
        (0_u64..5, prop::bool::weighted(0.8)),
    )
        .prop_map(
            |(base, shared, own, follows, max_output, stop_after, transfer, (session, owned))| Turn {
                session,
                owned,
                base,
                shared,
                own,
                follows,
                max_output,
                stop_after,
                transfer,
            },
        )
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => turn().prop_map(Operation::Submit),
        1 => proptest::collection::vec(turn(), 2..5).prop_map(Operation::Burst),
        16 => Just(Operation::Step),
        1 => Just(Operation::ForgetfulStep),
        2 => (0_usize..40).prop_map(Operation::Abort),
        5 => (0_usize..8, prop::bool::weighted(0.8)).prop_map(|(index, ok)| Operation::ImportDone(index, ok)),
        4 => (0_usize..8).prop_map(Operation::ReloadDone),
        2 => (0_usize..8).prop_map(Operation::Ack),
        1 => (0_usize..8).prop_map(Operation::Release),
        2 => (0_usize..8).prop_map(Operation::Renew),
        1 => (0_u64..1500).prop_map(Operation::Wait),
        1 => Just(Operation::ClearCache),
    ]
}

fn config() -> impl Strategy<Value = EngineConfig> {
    let sizes = (4_u32..30, 1_u32..20, 1_u32..6, 0_u32..8);
    let eviction = prop_oneof![
        Just(Eviction::Lru),
        prop::option::of(1_u32..40).prop_map(|tokens| Eviction::Expected {
            cost_doubles_after_tokens: tokens
        })
    ];
    (sizes, kind(), prop_oneof![Just(0), 1_u32..60], eviction).prop_map(|(sizes, kind, host_blocks, eviction)| {
        let (kv_blocks, max_batch_tokens, max_running, max_waiting) = sizes;
        EngineConfig {
            max_batch_tokens,
            max_running,
            max_waiting,
            max_context_tokens: 120,
            kind,
            host_blocks,
            eviction,
            ..small(kv_blocks)
        }
    })
}

fn kind() -> impl Strategy<Value = EngineKind> {
    let slots = (0.2_f64..1.0, proptest::option::of(0_u32..4), 0_u32..9, any::<bool>());
    let slots = slots.prop_map(|(capacity_factor, soft_cap, reserve_tokens_per_running, exhausted)| {
        EngineKind::SessionSlot(SlotConfig {
            capacity_factor,
            soft_cap,
            reserve_tokens_per_running,
            trim: if exhausted {
                TrimRule::Exhausted
            } else {
                TrimRule::NoRoom
            },
            correction_crash: false,
            correction_refused: false,
        })
    });
    prop_oneof![2 => Just(EngineKind::Block), 1 => Just(EngineKind::Vllm), 3 => slots]
}

/// A schedule in play.
struct Play {
    driver: Driver,
    next_id: u64,
}

impl Play {
    fn submit(&mut self, turn: &Turn) {
        let mut prompt = tokens(turn.base, turn.shared);
        let earlier = turn.follows.and_then(|index| self.driver.requests.values().nth(index));
        if let Some(earlier) = earlier {
            prompt.clone_from(&earlier.tokens);
        }
        let own = u32::try_from(1000 + self.next_id).expect("small");
        prompt.extend(tokens(own, turn.own));
        let length = u32::try_from(prompt.len()).expect("small");
        let transfer = match turn.transfer {
            Kind::Plain => Transfer::None,
            Kind::Export => Transfer::Export,
            Kind::Import(tenths) => Transfer::Import {
                tokens: length * tenths / 10,
            },
        };
        self.next_id += 1;
        self.driver.session = Some(SessionId(turn.session));
        self.driver.owner = turn.owned.then_some(Owner {
            session: SessionId(turn.session),
            kind: (turn.session % 3) as u8,
        });
        self.driver
            .submit_stopping(self.next_id, &prompt, turn.max_output, turn.stop_after, transfer);
    }

    fn play(&mut self, operation: &Operation) {
        match operation {
            Operation::Submit(turn) => self.submit(turn),
            Operation::Burst(turns) => turns.iter().for_each(|turn| self.submit(turn)),
            Operation::Step => {
                self.driver.run_step();
            }
            Operation::ForgetfulStep => {
                self.driver.run_step_without(|id| id.0.is_multiple_of(2));
            }
            Operation::Abort(index) => self.driver.input(Input::Abort(RequestId(*index as u64))),
            Operation::ImportDone(index, ok) => {
                let import = self.driver.imports.keys().nth(*index).copied();
                let outcome = if *ok { Ok(()) } else { Err(ImportError::Corrupt) };
                if let Some(id) = import {
                    self.driver.finish_import(id, outcome);
                }
            }
            Operation::ReloadDone(index) => {
                let reload = self.driver.reloads.keys().nth(*index).copied();
                if let Some(id) = reload {
                    self.driver.finish_reload(id);
                }
            }
            Operation::Release(index) => {
                let export = self.driver.exports.keys().nth(*index).copied();
                if let Some(id) = export {
                    self.driver.input(Input::ReleaseExported(id));
                }
            }
            Operation::Renew(index) => {
                let export = self.driver.exports.keys().nth(*index).copied();
                if let Some(id) = export {
                    self.driver.input(Input::RenewExport(id));
                }
            }
            Operation::Ack(index) => {
                let export = self.driver.exports.keys().nth(*index).copied();
                if let Some(id) = export {
                    self.driver.ack(id);
                }
            }
            Operation::Wait(milliseconds) => {
                self.driver.now += Duration::from_millis(*milliseconds);
                self.driver.input(Input::Timeout);
            }
            Operation::ClearCache => self.driver.input(Input::ClearCache),
        }
    }

    /// A patient world: imports and reloads succeed, leases end, steps run, until nothing is left. With session slots a
    /// request can wait for ever beside slots that are not trimmed for it; its driver gives it up, but never one that runs.
    fn finish(&mut self) {
        for _ in 0..MAX_ROUNDS {
            self.driver.run();
            if let Some(id) = self.driver.imports.keys().next().copied() {
                self.driver.finish_import(id, Ok(()));
            } else if let Some(id) = self.driver.reloads.keys().next().copied() {
                self.driver.finish_reload(id);
            } else if self.driver.engine.poll_timeout().is_some() {
                self.driver.advance_to_timeout();
            } else if let Some(id) = self.starved() {
                self.driver.input(Input::Abort(id));
            } else {
                self.driver.assert_idle();
                return;
            }
        }
        panic!(
            "not done after {MAX_ROUNDS} rounds: {:?}",
            self.driver.engine.snapshot()
        );
    }

    /// A request that waits in vain.
    fn starved(&self) -> Option<RequestId> {
        let waiting = self.driver.live().next()?;
        let snapshot = self.driver.engine.snapshot();
        assert!(
            matches!(self.driver.config.kind, EngineKind::SessionSlot(_)),
            "without slots nobody waits for ever: {snapshot:?}"
        );
        assert_eq!((snapshot.running, snapshot.retracted), (0, 0), "what has run goes on");
        Some(waiting)
    }

    /// With an idle engine: the totals are the sums over the requests.
    fn assert_totals(&self) {
        let snapshot = self.driver.engine.snapshot();
        let ends = self.driver.requests.values().filter_map(|request| request.end);
        let (mut local, mut host, mut imported, mut output, mut preemptions) = (0, 0, 0, 0, 0);
        for end in ends {
            local += u64::from(end.usage.local_cached_tokens);
            host += u64::from(end.usage.host_cached_tokens);
            imported += u64::from(end.usage.imported_tokens);
            output += u64::from(end.usage.output_tokens);
            preemptions += u64::from(end.usage.preemptions);
        }
        assert_eq!(snapshot.cache_hit_tokens, local);
        assert_eq!(snapshot.host_hit_tokens, host);
        assert_eq!(snapshot.imported_tokens, imported);
        assert_eq!(snapshot.output_tokens, output);
        assert_eq!(snapshot.preemptions, preemptions);
        let pulled = snapshot.host_hit_tokens + snapshot.imported_tokens;
        assert!(snapshot.cache_hit_tokens + pulled + snapshot.computed_tokens <= self.prompt_tokens());
    }

    fn prompt_tokens(&self) -> u64 {
        self.driver.requests.values().map(|request| request.prompt as u64).sum()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_once_with_the_right_kv(
        config in config(),
        schedule in proptest::collection::vec(operation(), 1..90),
    ) {
        let mut play = Play { driver: Driver::new(config), next_id: 0 };
        for operation in &schedule {
            play.play(operation);
        }
        play.finish();
        play.assert_totals();
        // What is cached can be dropped, and then nothing is.
        play.driver.input(Input::ClearCache);
        prop_assert_eq!(play.driver.engine.cached_blocks(), 0);
        prop_assert!(play.driver.cache.is_empty() && play.driver.host.is_empty());
        prop_assert_eq!(play.driver.engine.snapshot().slots, 0);
    }
}
