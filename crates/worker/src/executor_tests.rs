//! What the executor adds to the engine core: sequences, stop rules, events' tokens, and guards around transfers.

use super::*;
use crate::backend::{NamedBlock, StepOutcome};
use crate::request::StopRules;
use crate::text::StopStrings;
use homing_engine::api::{ExportEnd, Transfer};
use homing_kv::{BlockId, hash_blocks};

const BLOCK: u32 = 4;

/// Answers the letters in order of their positions, or fails.
#[derive(Default)]
struct Scripted {
    fails: bool,
    written: Vec<BlockId>,
}

impl Backend for Scripted {
    fn run(&mut self, _step: &Step, items: &[Item<'_>]) -> Result<StepOutcome, BackendError> {
        if self.fails {
            return Err(BackendError::Forward("out of order".to_owned()));
        }
        let chosen = items.iter().filter(|item| item.choice.is_some()).map(|item| {
            assert!(
                item.table.len() * BLOCK as usize >= item.start + item.count,
                "blocks for all tokens"
            );
            let token = u32::from(b'a') + (item.sequence.len() % 26) as u32;
            Chosen { token, digest: None }
        });
        let wait = Duration::from_millis(5);
        Ok(StepOutcome {
            chosen: chosen.collect(),
            wait,
        })
    }

    fn payload_bytes(&self) -> usize {
        1
    }

    fn read_block(&self, block: &NamedBlock) -> Vec<u8> {
        vec![block.block.0 as u8]
    }

    fn write_block(&mut self, block: &NamedBlock, payload: &[u8]) -> Result<(), BackendError> {
        if payload.len() != 1 {
            return Err(BackendError::PayloadLength {
                got: payload.len(),
                want: 1,
            });
        }
        self.written.push(block.block);
        Ok(())
    }

    fn transfer_wait(&self, tokens: u32) -> Duration {
        Duration::from_micros(u64::from(tokens))
    }
}

fn executor(blocks: u32) -> Executor<Scripted> {
    let config = EngineConfig {
        block_size: BLOCK,
        kv_blocks: blocks,
        max_batch_tokens: 16,
        ..EngineConfig::default()
    };
    Executor::new(config, Scripted::default(), Tokenizer::bytes())
}

fn request(prompt: &[u32], outputs: u32, transfer: Transfer) -> Request {
    Request::greedy(prompt, BLOCK, outputs, transfer)
}

fn now() -> Instant {
    Instant::from_nanos(1)
}

fn drain(executor: &mut Executor<Scripted>) -> Vec<Effect> {
    let effects = std::iter::from_fn(|| executor.poll()).collect();
    executor.check_invariants();
    effects
}

/// Runs until nothing happens any more.
fn finish(executor: &mut Executor<Scripted>) -> Vec<Effect> {
    let mut effects = drain(executor);
    while executor.step_ready() {
        let _ = executor.run_step();
        executor.complete_step(now());
        effects.extend(drain(executor));
    }
    effects
}

fn text(effects: &[Effect]) -> String {
    let pieces = effects.iter().filter_map(|effect| match effect {
        Effect::Token(token) => Some(token.text.as_str()),
        Effect::Ended(ended) => Some(ended.text.as_str()),
        _ => None,
    });
    pieces.collect()
}

fn ended(effects: &[Effect]) -> &Ended {
    let ended = effects.iter().find_map(|effect| match effect {
        Effect::Ended(ended) => Some(ended),
        _ => None,
    });
    ended.unwrap_or_else(|| panic!("no end in {effects:?}"))
}

fn check_idle(executor: &Executor<Scripted>) {
    let load = executor.snapshot();
    assert_eq!(load.blocks_free + load.blocks_evictable, load.blocks_total, "{load:?}");
}

#[test]
fn outputs_end_by_their_rules() {
    // After three tokens of prompt come `d`, `e`, `f`, ...
    let check = |stop: StopRules, shown: &str, outcome: Outcome, tokens: u32| {
        let mut executor = executor(16);
        let described = format!("{stop:?}");
        let request = Request {
            stop,
            ..request(&[1, 2, 3], 8, Transfer::None)
        };
        executor.submit(now(), RequestId(1), request);
        let effects = finish(&mut executor);
        let ended = ended(&effects);
        assert_eq!(
            (text(&effects).as_str(), &ended.outcome),
            (shown, &outcome),
            "{described}"
        );
        assert_eq!(ended.usage.output_tokens, tokens, "{described}");
        check_idle(&executor);
    };
    let strings = |strings: &[&str], include| StopStrings {
        strings: strings.iter().map(|text| (*text).to_owned()).collect(),
        include,
    };
    let none = StopRules::default;
    check(none(), "defghijk", Outcome::Length, 8);
    let by_string = Outcome::Stop(StopCause::Text("gh".to_owned()));
    check(
        StopRules {
            strings: strings(&["gh"], false),
            ..none()
        },
        "def",
        by_string.clone(),
        5,
    );
    check(
        StopRules {
            strings: strings(&["gh"], true),
            ..none()
        },
        "defgh",
        by_string,
        5,
    );
    check(
        StopRules {
            strings: strings(&["kx"], false),
            ..none()
        },
        "defghijk",
        Outcome::Length,
        8,
    );
    let token = u32::from(b'f');
    let by_token = Outcome::Stop(StopCause::Token(token));
    check(
        StopRules {
            tokens: vec![token],
            ..none()
        },
        "de",
        by_token,
        3,
    );
    let late = StopRules {
        tokens: vec![token],
        min_output_tokens: 4,
        ..none()
    };
    check(late, "defghijk", Outcome::Length, 8);
}

#[test]
fn a_backend_that_fails_ends_the_steps_requests_and_nothing_else() {
    let mut executor = executor(16);
    executor.submit(now(), RequestId(1), request(&[1; 5], 8, Transfer::None));
    executor.submit(now(), RequestId(2), request(&[2; 5], 8, Transfer::None));
    drain(&mut executor);
    executor.backend.fails = true;
    assert!(executor.run_step().is_err());
    executor.complete_step(now());
    let effects = drain(&mut executor);
    let failed = effects
        .iter()
        .filter(|effect| matches!(effect, Effect::Ended(ended) if ended.outcome == Outcome::BackendFailed));
    assert_eq!(failed.count(), 2, "{effects:?}");
    check_idle(&executor);
    executor.backend.fails = false;
    executor.submit(now(), RequestId(3), request(&[1; 5], 2, Transfer::None));
    assert_eq!(ended(&finish(&mut executor)).outcome, Outcome::Length);
}

#[test]
fn a_request_may_be_given_up_at_any_moment_of_a_step() {
    for moment in 0..3 {
        let mut executor = executor(16);
        executor.submit(now(), RequestId(1), request(&[1; 5], 8, Transfer::None));
        executor.submit(now(), RequestId(2), request(&[2; 5], 2, Transfer::None));
        let mut effects = drain(&mut executor);
        let abort = |executor: &mut Executor<Scripted>, at| {
            if at == moment {
                executor.abort(now(), RequestId(1));
            }
            drain(executor)
        };
        effects.extend(abort(&mut executor, 0));
        assert_eq!(executor.run_step(), Ok(Duration::from_millis(5)));
        effects.extend(abort(&mut executor, 1));
        executor.complete_step(now());
        effects.extend(abort(&mut executor, 2));
        effects.extend(finish(&mut executor));
        let tokens = |id| {
            effects
                .iter()
                .filter(|effect| matches!(effect, Effect::Token(token) if token.id == id))
                .count()
        };
        assert_eq!(tokens(RequestId(2)), 2, "moment {moment}");
        assert_eq!(tokens(RequestId(1)), usize::from(moment == 2), "moment {moment}");
        check_idle(&executor);
    }
}

#[test]
fn events_carry_the_tokens_of_their_blocks() {
    let mut executor = executor(16);
    let prompt: Vec<u32> = (0..10).collect();
    executor.submit(now(), RequestId(1), request(&prompt, 7, Transfer::None));
    let effects = finish(&mut executor);
    let mut sequence = prompt;
    sequence.extend(effects.iter().filter_map(|effect| match effect {
        Effect::Token(token) => Some(token.token),
        _ => None,
    }));
    let (mut stored, mut hashes) = (Vec::<u32>::new(), Vec::<homing_kv::BlockHash>::new());
    for effect in &effects {
        if let Effect::Kv(KvOut {
            change: KvChange::Stored { hashes: new, .. },
            tokens,
        }) = effect
        {
            assert_eq!(tokens.len(), new.len() * BLOCK as usize);
            stored.extend(tokens);
            hashes.extend(new);
        }
    }
    assert_eq!(stored, sequence[..16], "the last token has no kv");
    assert_eq!(hashes, hash_blocks(&sequence[..16], BLOCK));
}

#[test]
fn blocks_are_open_while_they_are_under_transfer_and_no_longer() {
    let mut executor = executor(16);
    let prompt = [7; 10];
    executor.submit(now(), RequestId(1), request(&prompt, 1, Transfer::Export));
    let export = ended(&finish(&mut executor)).export.clone().expect("it asked for one");
    assert_eq!((export.tokens, export.blocks.len()), (10, 3));
    assert!(executor.read_export(RequestId(1), 2).is_some() && executor.read_export(RequestId(1), 3).is_none());
    executor.export_ack(now(), RequestId(1));
    let effects = drain(&mut executor);
    assert!(
        matches!(
            effects[..],
            [Effect::ExportEnded {
                reason: ExportEnd::Acked,
                ..
            }]
        ),
        "{effects:?}"
    );
    assert!(executor.read_export(RequestId(1), 0).is_none());
    let other = [8; 10];
    let pull = |executor: &mut Executor<Scripted>, id| {
        executor.submit(now(), id, request(&other, 2, Transfer::Import { tokens: 10 }));
        let effects = drain(executor);
        let [Effect::Pull(order)] = &effects[..] else {
            panic!("no pull in {effects:?}")
        };
        assert_eq!(
            (order.first_block, order.blocks, order.wait),
            (0, 3, Duration::from_micros(10))
        );
    };
    // Given up: nothing is written any more, and the source is told.
    pull(&mut executor, RequestId(2));
    assert_eq!(executor.write_import(RequestId(2), 0, &[1]), Ok(()));
    assert_eq!(
        executor.write_import(RequestId(2), 1, &[1, 2]),
        Err(ImportError::Corrupt)
    );
    assert_eq!(executor.write_import(RequestId(2), 3, &[1]), Err(ImportError::TimedOut));
    executor.abort(now(), RequestId(2));
    let effects = drain(&mut executor);
    assert!(
        matches!(effects[0], Effect::ReleaseSource { id: RequestId(2) }),
        "{effects:?}"
    );
    assert_eq!(executor.write_import(RequestId(2), 1, &[1]), Err(ImportError::TimedOut));
    executor.import_done(now(), RequestId(2), Ok(()));
    check_idle(&executor);
    // Failed: nothing is generated, and the source keeps the offer.
    pull(&mut executor, RequestId(3));
    executor.import_done(now(), RequestId(3), Err(ImportError::Corrupt));
    let effects = drain(&mut executor);
    assert_eq!(ended(&effects).outcome, Outcome::ImportFailed(ImportError::Corrupt));
    assert_eq!(effects.len(), 1, "{effects:?}");
    // Served, then known: the second time nothing is pulled, and the source is told.
    pull(&mut executor, RequestId(4));
    executor.import_done(now(), RequestId(4), Ok(()));
    assert_eq!(ended(&finish(&mut executor)).usage.imported_tokens, 9);
    executor.submit(
        now(),
        RequestId(5),
        request(&other[..9], 1, Transfer::Import { tokens: 9 }),
    );
    let effects = finish(&mut executor);
    assert!(
        matches!(effects[0], Effect::ReleaseSource { id: RequestId(5) }),
        "{effects:?}"
    );
    check_idle(&executor);
}

/// Bytes are read for as long as the lease lasts, renewed or not.
#[test]
fn what_is_renewed_can_be_read_until_its_new_end() {
    let mut executor = executor(16);
    executor.submit(now(), RequestId(1), request(&[7; 10], 1, Transfer::Export));
    assert_eq!(executor.renew_export(now(), RequestId(1)), None, "it holds nothing yet");
    let export = ended(&finish(&mut executor)).export.clone().expect("it asked for one");
    let late = now() + Duration::from_secs(29);
    let renewed = executor.renew_export(late, RequestId(1)).expect("it is held");
    assert!(renewed > export.lease_ends, "{renewed} after {}", export.lease_ends);
    assert_eq!(executor.export(RequestId(1)).map(|view| view.lease_ends), Some(renewed));
    executor.timeout(export.lease_ends);
    assert!(
        executor.read_export(RequestId(1), 0).is_some(),
        "its first end says nothing"
    );
    executor.timeout(renewed);
    let effects = drain(&mut executor);
    let [Effect::ExportEnded { reason, .. }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!(*reason, ExportEnd::LeaseEnded);
    assert_eq!(executor.renew_export(renewed, RequestId(1)), None);
    assert!(executor.read_export(RequestId(1), 0).is_none());
    check_idle(&executor);
}

#[test]
fn a_reload_that_nobody_configured_fails_its_request_and_nothing_else() {
    let config = EngineConfig {
        block_size: BLOCK,
        kv_blocks: 10,
        host_blocks: 20,
        ..EngineConfig::default()
    };
    let mut executor = Executor::new(config, Scripted::default(), Tokenizer::bytes());
    for (id, token) in [(1, 1), (2, 2)] {
        executor.submit(now(), RequestId(id), request(&[token; 33], 1, Transfer::None));
        finish(&mut executor);
    }
    executor.submit(now(), RequestId(3), request(&[1; 33], 1, Transfer::None));
    assert_eq!(ended(&finish(&mut executor)).outcome, Outcome::BackendFailed);
    executor.submit(now(), RequestId(4), request(&[2; 5], 1, Transfer::None));
    assert_eq!(ended(&finish(&mut executor)).outcome, Outcome::Length);
    check_idle(&executor);
}
