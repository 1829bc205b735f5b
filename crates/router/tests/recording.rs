//! The recording's codec: what is written is read again, and whatever else is read is an error with its place.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use homing_kv::{BlockHash, Prompt, Sketch, Tier};
use homing_router::RouterConfig;
use homing_router::event::{
    Abilities, ClientKind, Compared, Event, FailureCause, HealthReport, KvBatch, KvUpdate, Leg, LegFailure, LegId,
    LegUsage, LoadReport, PromptId, Resume, Role, RoomReport, SessionHint, SessionSketch, SketchReport, Turn,
    WorkerInfo,
};
use homing_router::recording::{Entry, Recorder, Recording, RecordingError, ReplayError, replay};
use homing_units::{BootEpoch, Duration, Instant, RequestId, SessionId, WorkerId};
use proptest::prelude::*;

fn prompt() -> impl Strategy<Value = Prompt> {
    // A shared head, then one of a few tails: what prompts of real sessions share.
    (0..40_u128, 0..4_u128, 0..40_u128, 0..16_u32).prop_map(|(head, tail, more, rest)| {
        let hashes: Vec<_> = (0..head)
            .map(|index| BlockHash(u128::MAX - index))
            .chain((0..more).map(|index| BlockHash(tail << 64 | head << 32 | index)))
            .collect();
        let tokens = u32::try_from(hashes.len()).unwrap() * 16 + rest;
        Prompt::new(hashes, tokens, 16)
    })
}

fn leg() -> impl Strategy<Value = LegId> {
    (
        0..9_u64,
        0..3_u32,
        prop_oneof![Just(Leg::Lend), Just(Leg::Fetch), Just(Leg::Prefill), Just(Leg::Decode)],
    )
        .prop_map(|(request, attempt, leg)| LegId {
            request: RequestId(request),
            attempt,
            leg,
        })
}

fn worker() -> impl Strategy<Value = WorkerId> {
    (0..4_u32).prop_map(WorkerId)
}

fn update() -> impl Strategy<Value = KvUpdate> {
    let hashes = || prop::collection::vec(any::<u128>().prop_map(BlockHash), 0..5);
    let tier = || prop_oneof![Just(Tier::Gpu), Just(Tier::Host)];
    prop_oneof![
        (prop::option::of(any::<u128>().prop_map(BlockHash)), hashes(), tier())
            .prop_map(|(parent, hashes, tier)| KvUpdate::Stored { parent, hashes, tier }),
        (hashes(), tier()).prop_map(|(hashes, tier)| KvUpdate::Removed { hashes, tier }),
        Just(KvUpdate::Cleared),
    ]
}

fn sketch() -> impl Strategy<Value = SessionSketch> {
    let blocks = prop::collection::vec(any::<u128>().prop_map(BlockHash), 0..20);
    (prop::option::of((0..4_u64).prop_map(SessionId)), any::<u64>(), blocks).prop_map(|(session, tip, blocks)| {
        SessionSketch {
            session,
            tip_blocks: u32::try_from(blocks.len()).unwrap(),
            tip,
            sketch: Sketch::of(&blocks).unwrap(),
        }
    })
}

fn sketches() -> impl Strategy<Value = Event> {
    (
        worker(),
        1..3_u64,
        0..9_u64,
        0..3_000_u64,
        prop::collection::vec(sketch(), 0..3),
    )
        .prop_map(|(worker, epoch, sequence, age_ms, sketches)| {
            Event::Sketches(SketchReport {
                worker,
                epoch: BootEpoch(epoch),
                sequence,
                age: Duration::from_millis(age_ms),
                sketches,
            })
        })
}

/// Events of workers.
fn worker_event() -> impl Strategy<Value = Event> {
    let info = |(id, epoch, transfers, kv_events): (WorkerId, u64, bool, bool)| {
        Event::WorkerJoined(WorkerInfo {
            id,
            name: format!("w{}", id.0),
            role: Role::Both,
            epoch: BootEpoch(epoch),
            kv_tokens: 1 << 20,
            max_context_tokens: 9_999,
            transfers,
            kv_events,
            abilities: Abilities {
                hands_over: transfers,
                ..Abilities::default()
            },
        })
    };
    let load = |(worker, running, kv_tokens_used)| LoadReport {
        worker,
        running,
        waiting: 1,
        kv_tokens_used,
        transfer_queue: running / 2,
        retracted: 0,
    };
    let batch = |(worker, sequence, updates)| KvBatch {
        worker,
        epoch: BootEpoch(1),
        sequence,
        updates,
    };
    prop_oneof![
        (worker(), any::<u64>(), any::<bool>(), any::<bool>()).prop_map(info),
        worker().prop_map(Event::WorkerLeft),
        (
            worker(),
            prop::option::of(any::<u64>().prop_map(BootEpoch)),
            any::<bool>()
        )
            .prop_map(|(worker, epoch, alive)| Event::Health(HealthReport { worker, epoch, alive })),
        (worker(), any::<u32>(), any::<u64>())
            .prop_map(load)
            .prop_map(Event::Load),
        (worker(), 1..3_u64, any::<u64>(), 0..3_000_u64).prop_map(|(worker, epoch, spare_tokens, pause_ms)| {
            Event::Room(RoomReport {
                worker,
                epoch: BootEpoch(epoch),
                spare_tokens,
                pause: Duration::from_millis(pause_ms),
            })
        }),
        sketches(),
        (worker(), any::<u64>(), prop::collection::vec(update(), 0..4))
            .prop_map(batch)
            .prop_map(Event::Kv),
        (worker(), any::<bool>()).prop_map(|(worker, complete)| Event::ResyncDone { worker, complete }),
        Just(Event::Timeout),
    ]
}

/// Events of requests.
fn request_event() -> impl Strategy<Value = Event> {
    let cause = prop_oneof![
        Just(FailureCause::Unreachable),
        Just(FailureCause::Transfer),
        Just(FailureCause::Invalid)
    ];
    let resume = prop_oneof![
        Just(Resume::Start),
        Just(Resume::Impossible),
        (prompt(), 0..99_u32).prop_map(|(prompt, max_output_tokens)| Resume::After {
            prompt,
            max_output_tokens
        }),
    ];
    let hint = prop_oneof![
        Just(SessionHint::Recognise),
        any::<u128>().prop_map(SessionHint::Explicit)
    ];
    let compared = prop::option::of(
        (any::<u64>(), prop::option::of(any::<u64>())).prop_map(|(prompt, continues)| Compared {
            prompt: PromptId(prompt),
            continues: continues.map(PromptId),
        }),
    );
    let turn = |(id, session, prompt, (max_output_tokens, priority, kind), compared)| Turn {
        request: RequestId(id),
        session,
        prompt,
        max_output_tokens,
        priority,
        compared,
        kind: ClientKind(kind),
    };
    let usage = |output_tokens| LegUsage {
        cached_tokens: None,
        output_tokens,
    };
    prop_oneof![
        (any::<u64>(), hint, prompt(), any::<(u32, i32, u8)>(), compared)
            .prop_map(turn)
            .prop_map(Event::Turn),
        (leg(), prop::option::of(any::<u32>()))
            .prop_map(|(leg, cached_tokens)| Event::PrefillDone { leg, cached_tokens }),
        leg().prop_map(|leg| Event::FirstToken { leg }),
        (leg(), any::<u32>()).prop_map(move |(leg, tokens)| Event::Finished {
            leg,
            usage: usage(tokens)
        }),
        (leg(), cause, resume).prop_map(|(leg, cause, resume)| Event::LegFailed(LegFailure { leg, cause, resume })),
        any::<u64>().prop_map(|id| Event::ClientGone(RequestId(id))),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![worker_event(), request_event()]
}

fn record(events: &[(u64, Event)]) -> Vec<u8> {
    let mut recorder = Recorder::new(&RouterConfig {
        seed: 7,
        ..RouterConfig::default()
    });
    let mut bytes = Vec::new();
    for (at, event) in events {
        recorder.event(Instant::from_nanos(*at), event);
        bytes.extend(recorder.take_bytes());
    }
    recorder.finish();
    bytes.extend(recorder.take_bytes());
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_written_is_read_again(events in prop::collection::vec((any::<u64>(), event()), 0..40)) {
        let bytes = record(&events);
        let recording = Recording::open(&bytes).unwrap();
        prop_assert_eq!(recording.config().seed, 7);
        let mut read = Vec::new();
        let mut ended = false;
        for entry in recording {
            match entry.unwrap() {
                Entry::Event(at, event) => read.push((at.as_nanos(), *event)),
                Entry::Checkpoint(checkpoint) => panic!("{checkpoint:?}"),
                Entry::End(checkpoint) => {
                    prop_assert_eq!(checkpoint.events, events.len() as u64);
                    ended = true;
                }
            }
        }
        prop_assert!(ended);
        prop_assert_eq!(read, events);
    }

    /// Bytes that are changed, cut or added anywhere are read to an end or an error, and never to a panic.
    #[test]
    fn damage_is_an_error_with_its_place(
        events in prop::collection::vec((any::<u64>(), event()), 1..12),
        at in any::<prop::sample::Index>(),
        change in 1..=255_u8,
        cut in any::<bool>(),
    ) {
        let mut bytes = record(&events);
        let at = at.index(bytes.len());
        if cut {
            bytes.truncate(at);
        } else {
            bytes[at] ^= change;
        }
        let errors = match Recording::open(&bytes) {
            Ok(recording) => recording.filter_map(Result::err).count(),
            Err(_) => 1,
        };
        // A cut between two frames leaves a recording without its end, and no error; everything else is noticed.
        prop_assert!(errors == 1 || cut && errors == 0, "{errors} errors after byte {at} was changed or cut: {cut}");
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = record(&[(1, Event::Timeout)]);
        bytes.extend(&noise);
        let _ = Recording::open(&noise).map(Iterator::count);
        let _ = replay(&bytes, |_, _, _, _| {});
    }
}

#[test]
fn errors_say_what_was_expected() {
    let check = |bytes: &[u8], expected: &str| assert_eq!(Recording::open(bytes).unwrap_err().to_string(), expected);
    // What a recorder writes is of the version that a reader takes.
    let written = record(&[]);
    let version = u16::from_le_bytes([written[13], written[14]]);
    check(b"", "this is no recording: expected it to start with `homing-events`");
    check(
        b"homing-events\xff\xff",
        &format!("recording of format version `65535`, expected `{version}`"),
    );
    check(
        b"homing-events\x01",
        "the recording is cut off at byte 13, in a frame that needs 1 bytes more",
    );
    check(
        &written[..15],
        "the recording is cut off at byte 15, in a frame that needs 9 bytes more",
    );
    let mut flipped = record(&[]);
    flipped[30] ^= 1;
    check(
        &flipped,
        "the recording is damaged at byte 15: the checksum does not match",
    );
}

/// Events are written as arrays of their fields, so that one of before a field was there is only shorter.
#[test]
fn a_turn_of_before_there_were_kinds_is_read() {
    let turn = Turn {
        request: RequestId(4),
        session: SessionHint::Explicit(77),
        prompt: Prompt::new([], 5, 16),
        max_output_tokens: 9,
        priority: 3,
        compared: None,
        kind: ClientKind::default(),
    };
    let old = (turn.request, turn.session, &turn.prompt, 9_u32, 3_i32, turn.compared);
    let old = rmp_serde::to_vec(&old).unwrap();
    assert_eq!(rmp_serde::from_slice::<Turn>(&old).unwrap(), turn);
}

#[test]
fn a_session_costs_its_new_blocks_only() {
    let turn = |request: u64| {
        let blocks: Vec<_> = (0..1_000 + u128::from(request) * 10)
            .map(|index| BlockHash(index << 70 | 1))
            .collect();
        let tokens = u32::try_from(blocks.len() * 16).unwrap();
        let (session, prompt) = (SessionHint::Recognise, Prompt::new(blocks, tokens, 16));
        (
            request,
            Event::Turn(Turn {
                request: RequestId(request),
                session,
                prompt,
                max_output_tokens: 9,
                priority: 0,
                compared: None,
                kind: ClientKind::default(),
            }),
        )
    };
    let one = record(&[turn(0)]).len();
    let all = record(&(0..50).map(turn).collect::<Vec<_>>()).len();
    assert!(
        one > 16_000 && (all - one) / 49 < 300,
        "first turn {one} bytes, later ones {} each",
        (all - one) / 49
    );
}

#[test]
fn a_replay_tells_whether_the_same_was_done() {
    let events = [(0, Event::Timeout), (5, Event::ClientGone(RequestId(3)))];
    let bytes = record(&events);
    let done = replay(&bytes, |_, _, _, _| {}).unwrap();
    assert!(done.complete && done.compared == Some(done.reached), "{done:?}");
    // Cut off: read as far as it goes, and nothing to compare.
    let cut = replay(&bytes[..bytes.len() - 1], |_, _, _, _| {}).unwrap();
    assert!(!cut.complete && cut.reached.events == 2, "{cut:?}");
    // Two recordings in one file: neither is replayed as if it were all.
    let error = replay(&bytes.repeat(2), |_, _, _, _| {}).unwrap_err();
    let length = bytes.len();
    assert_eq!(
        error.to_string(),
        format!(
            "the recording ends at byte {length}, and {length} bytes come after it: expected one recording and nothing else"
        )
    );
    // A turn without a worker is rejected; a recording that claims that nothing was done differs.
    let turn = Turn {
        request: RequestId(0),
        session: SessionHint::Recognise,
        prompt: Prompt::new([], 5, 16),
        max_output_tokens: 1,
        priority: 0,
        compared: None,
        kind: ClientKind::default(),
    };
    let error = replay(&record(&[(0, Event::Turn(turn))]), |_, _, _, _| {}).unwrap_err();
    assert!(
        matches!(error, ReplayError::Differs { replayed, .. } if replayed.actions == 1),
        "{error}"
    );
    let at = Instant::ZERO + Duration::from_secs(1);
    assert!(
        matches!(Recording::open(&[1]), Err(RecordingError::NoRecording)),
        "{at}"
    );
}
