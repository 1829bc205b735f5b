//! Session slots: who holds KV between requests, what is trimmed, and how sessions come to wait for each other.

use homing_engine::Engine;
use homing_engine::api::{
    EngineConfig, EngineKind, FinishReason, Import, Input, Output, Sampled, SlotConfig, Submit, Transfer, TrimRule,
};
use homing_kv::{BlockHash, Prompt};
use homing_units::{Instant, RequestId, SessionId};

const BLOCK: u32 = 16;

/// An engine of 100 blocks that is driven by hand.
struct Rig {
    engine: Engine,
    next: u64,
    /// Trims, as (session, blocks).
    trims: Vec<(u64, u32)>,
    imports: Vec<Import>,
    ended: Vec<(RequestId, FinishReason)>,
    crashed: bool,
    refused: Vec<RequestId>,
}

impl Rig {
    fn new(kind: EngineKind) -> Self {
        let config = EngineConfig {
            block_size: BLOCK,
            kv_blocks: 100,
            kind,
            ..EngineConfig::default()
        };
        Self {
            engine: Engine::new(config),
            next: 0,
            trims: Vec::new(),
            imports: Vec::new(),
            ended: Vec::new(),
            crashed: false,
            refused: Vec::new(),
        }
    }

    /// A request of a session for one token, over so many blocks of the session's own.
    fn submit(&mut self, session: u64, blocks: u32, transfer: Transfer) -> RequestId {
        let submit = self.request(session, blocks, transfer);
        let id = submit.id;
        self.input(Input::Submit(submit));
        id
    }

    fn request(&mut self, session: u64, blocks: u32, transfer: Transfer) -> Submit {
        let id = RequestId(self.next);
        self.next += 1;
        let hashes: Vec<BlockHash> = (0..blocks)
            .map(|index| BlockHash(u128::from(session) << 64 | u128::from(index)))
            .collect();
        let tokens = blocks * BLOCK;
        let transfer = match transfer {
            Transfer::Import { .. } => Transfer::Import { tokens },
            other => other,
        };
        Submit {
            id,
            prompt: Prompt::new(hashes, tokens, BLOCK),
            max_output_tokens: 1,
            transfer,
            session: Some(SessionId(session)),
            owner: None,
        }
    }

    fn append(&mut self, session: u64, blocks: u32) -> RequestId {
        self.submit(session, blocks, Transfer::None)
    }

    fn seed(&mut self, session: u64, blocks: u32) -> RequestId {
        self.submit(session, blocks, Transfer::Import { tokens: 0 })
    }

    /// Hands an input in and runs whatever steps follow; imports stay under way.
    fn input(&mut self, input: Input) {
        let mut next = Some(input);
        while let Some(input) = next.take() {
            self.engine.handle(Instant::ZERO, input);
            while let Some(output) = self.engine.poll_output() {
                match output {
                    Output::Step(step) => {
                        let sampled = step.items.iter().filter(|item| item.sample).map(|item| Sampled {
                            id: item.id,
                            stop: false,
                            filled: None,
                        });
                        next = Some(Input::StepDone(sampled.collect()));
                    }
                    Output::Import(import) => self.imports.push(import),
                    Output::Finished(finished) => self.ended.push((finished.id, finished.reason)),
                    Output::Trimmed(trimmed) => self.trims.push((trimmed.session.0, trimmed.blocks)),
                    Output::Crashed { .. } => self.crashed = true,
                    Output::Kv(_) | Output::Preempted { .. } | Output::Exported(_) => {}
                    Output::Reload(_) => panic!("slots have no host tier"),
                    Output::Rejected { id, .. } => self.refused.push(id),
                    Output::ExportEnded { .. } => panic!("not expected: {output:?}"),
                }
            }
            self.engine.check_invariants();
        }
    }

    fn arrive(&mut self, id: RequestId) {
        self.input(Input::ImportDone { id, outcome: Ok(()) });
    }

    /// A session's seed that comes at once.
    fn seeded(&mut self, session: u64, blocks: u32) {
        let id = self.seed(session, blocks);
        self.arrive(id);
        assert_eq!(self.ended.last(), Some(&(id, FinishReason::Length)));
    }

    fn slots(&self) -> Vec<u64> {
        (0..10).filter(|id| self.engine.has_slot(SessionId(*id))).collect()
    }
}

fn slots(change: impl FnOnce(&mut SlotConfig)) -> EngineKind {
    let mut config = SlotConfig {
        reserve_tokens_per_running: 0,
        ..SlotConfig::default()
    };
    change(&mut config);
    EngineKind::SessionSlot(config)
}

#[test]
fn a_slot_goes_as_a_whole_and_blocks_go_one_by_one() {
    let mut rig = Rig::new(slots(|_| ()));
    rig.seeded(1, 40);
    rig.seeded(2, 40);
    rig.seeded(3, 41);
    assert_eq!(
        rig.trims,
        [(1, 40)],
        "all of the least recently used session, for one block too few"
    );
    assert_eq!(
        rig.slots(),
        [2],
        "the pool was full when the third came: it is served without a slot"
    );

    let mut rig = Rig::new(EngineKind::Block);
    rig.seeded(1, 40);
    rig.seeded(2, 40);
    rig.seeded(3, 21);
    assert_eq!(rig.engine.snapshot().evicted_blocks, 1, "no more than what is needed");
}

#[test]
fn what_gets_no_slot_is_gone_when_it_ends() {
    let mut rig = Rig::new(slots(|_| ()));
    rig.seeded(1, 40);
    rig.seeded(2, 58);
    assert_eq!(rig.slots(), [1], "with it the pool would be used beyond 95%");
    assert_eq!(rig.engine.snapshot().blocks_free, 60);

    let mut rig = Rig::new(slots(|config| config.soft_cap = Some(1)));
    rig.seeded(1, 10);
    rig.seeded(2, 10);
    assert_eq!(rig.slots(), [1], "one slot at most");
    rig.seeded(1, 20);
    assert_eq!(rig.engine.snapshot().blocks_free, 80, "a slot is replaced");
}

#[test]
fn an_append_finds_its_slot_and_a_seed_takes_room_for_all() {
    let mut rig = Rig::new(slots(|_| ()));
    rig.seeded(1, 40);
    rig.append(1, 45);
    assert_eq!(rig.engine.snapshot().cache_hit_tokens, u64::from(40 * BLOCK));
    let seed = rig.seed(1, 50);
    let import = rig.imports.last().expect("there is room");
    assert_eq!((import.id, import.first_block, import.blocks.len()), (seed, 0, 50));
}

#[test]
fn an_opening_is_found_by_a_short_session_and_not_by_a_long_one() {
    for (blocks, slots) in [(55, [1, 2].as_slice()), (56, &[1])] {
        let mut rig = Rig::new(self::slots(|_| ()));
        rig.seeded(1, 40);
        rig.seeded(2, blocks);
        assert_eq!(rig.slots(), slots, "{blocks} blocks on top of 40 of 100");
    }
}

#[test]
fn a_slot_is_idle_while_its_session_brings_everything_anew() {
    let mut rig = Rig::new(slots(|_| ()));
    rig.seeded(1, 45);
    rig.seeded(2, 45);
    let seed = rig.seed(1, 50);
    assert_eq!(
        rig.trims,
        [(1, 45)],
        "its own slot makes room for it, as the least recently used"
    );
    rig.arrive(seed);
    assert_eq!(rig.slots(), [1, 2], "the new context takes the place of the old one");
}

#[test]
fn a_slot_that_an_append_waits_for_is_not_trimmed() {
    let mut rig = Rig::new(slots(|_| ()));
    rig.seeded(1, 45);
    rig.seeded(2, 45);
    // Both come before the engine looks.
    let append = rig.request(1, 46, Transfer::None);
    rig.engine.handle(Instant::ZERO, Input::Submit(append));
    rig.seed(3, 50);
    assert_eq!(rig.trims, [(2, 45)], "the older one is in use");
}

#[test]
fn by_the_other_reading_a_seed_waits_beside_idle_slots() {
    let mut rig = Rig::new(slots(|config| config.trim = TrimRule::Exhausted));
    rig.seeded(1, 40);
    rig.seeded(2, 40);
    rig.seed(3, 41);
    assert_eq!((rig.imports.len(), rig.trims.len()), (2, 0));
}

#[test]
fn a_prompt_shorter_than_its_slot_kills_the_engine_only_where_that_is_asked_for() {
    for (crash, refused) in [(true, false), (false, false), (false, true), (true, true)] {
        let mut rig = Rig::new(slots(|config| {
            (config.correction_crash, config.correction_refused) = (crash, refused);
        }));
        rig.seeded(1, 40);
        rig.append(1, 41);
        assert!(!rig.crashed && rig.refused.is_empty());
        let shorter = rig.append(1, 39);
        assert_eq!(rig.crashed, crash && !refused);
        assert_eq!(rig.refused == [shorter], refused);
    }
}
