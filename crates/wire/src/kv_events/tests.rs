//! Real frames of vLLM 0.32, older forms, and everything that a peer could get wrong.

use super::*;
use proptest::prelude::*;
use rmpv::Value;
use serde_json::Value as Json;

fn hex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|index| u8::from_str_radix(&text[index..index + 2], 16).expect("hex"))
        .collect()
}

/// The fixture's lines: topic, sequence, payload, and what another decoder made of the payload.
fn fixture() -> Vec<(String, Vec<u8>, Vec<u8>, Json)> {
    include_str!("../../tests/fixtures/vllm-0.32-kv-events.jsonl")
        .lines()
        .map(|line| {
            let line: Json = serde_json::from_str(line).expect("a line of JSON");
            let text = |name: &str| line[name].as_str().expect(name).to_owned();
            (
                text("topic"),
                hex(&text("seq_hex")),
                hex(&text("payload_hex")),
                line["decoded"].clone(),
            )
        })
        .collect()
}

/// An event as the fixture shows it.
fn to_json(event: &CacheEvent) -> Json {
    match event {
        CacheEvent::Stored(stored) => serde_json::json!({
            "type": "BlockStored", "block_hashes": stored.block_hashes, "parent_block_hash": stored.parent_block_hash,
            "token_ids": stored.token_ids, "block_size": stored.block_size, "lora_id": stored.lora_id,
            "medium": stored.medium, "lora_name": stored.lora_name, "extra_keys": stored.extra_keys,
            "group_idx": stored.group_idx, "kv_cache_spec_kind": "full_attention",
        }),
        CacheEvent::Removed(removed) => serde_json::json!({
            "type": "BlockRemoved", "block_hashes": removed.block_hashes, "medium": removed.medium,
            "group_idx": removed.group_idx,
        }),
        CacheEvent::AllCleared => serde_json::json!({"type": "AllBlocksCleared"}),
    }
}

#[test]
fn real_frames_are_read_and_written_byte_for_byte() {
    for (topic, sequence, payload, decoded) in fixture() {
        let frames = [
            Bytes::from(topic.clone()),
            Bytes::from(sequence),
            Bytes::from(payload.clone()),
        ];
        let frame = Frame::decode(&frames).expect("three frames");
        assert_eq!((frame.topic.as_str(), frame.encode()), (topic.as_str(), frames));
        let batch = EventBatch::decode(&frame.payload).expect("a batch");
        let events: Vec<Json> = batch.events.iter().map(to_json).collect();
        assert_eq!(
            serde_json::json!([batch.timestamp, events, batch.data_parallel_rank]),
            decoded
        );
        assert_eq!(batch.skipped, 0);
        assert_eq!(batch.encode(), payload, "our bytes are vLLM's");
    }
}

fn decode(value: &Value) -> Result<EventBatch, KvEventError> {
    let mut payload = Vec::new();
    rmpv::encode::write_value(&mut payload, value).expect("memory");
    EventBatch::decode(&payload)
}

fn list(items: Vec<Value>) -> Value {
    Value::Array(items)
}

fn map(entries: Vec<(&str, Value)>) -> Value {
    Value::Map(entries.into_iter().map(|(key, value)| (key.into(), value)).collect())
}

fn numbers(items: &[u64]) -> Value {
    list(items.iter().map(|item| Value::from(*item)).collect())
}

#[test]
fn older_and_leaner_forms_are_read() {
    let stored = BlockStored {
        block_hashes: vec![7, u64::MAX],
        parent_block_hash: Some(3),
        token_ids: vec![1, 2, 3, 4],
        block_size: 2,
        ..BlockStored::default()
    };
    let check = |event: Value, expected: CacheEvent| {
        let batch = decode(&list(vec![Value::from(1.5), list(vec![event.clone()])])).expect("a batch without a rank");
        assert_eq!(
            (batch.events, batch.data_parallel_rank),
            (vec![expected], None),
            "{event}"
        );
    };
    let bytes = |number: u64| Value::Binary([&[9; 24][..], &number.to_be_bytes()].concat());
    check(
        list(vec![
            "BlockStored".into(),
            list(vec![bytes(7), bytes(u64::MAX)]),
            bytes(3),
            numbers(&[1, 2, 3, 4]),
            2.into(),
            Value::Nil,
            "GPU".into(),
        ]),
        CacheEvent::Stored(BlockStored {
            medium: Some("GPU".into()),
            ..stored.clone()
        }),
    );
    check(
        map(vec![
            ("block_size", 2.into()),
            ("token_ids", numbers(&[1, 2, 3, 4])),
            ("block_hashes", list(vec![7.into(), Value::from(-1)])),
            ("parent_block_hash", 3.into()),
            ("type", "BlockStored".into()),
            ("from_the_future", numbers(&[1])),
        ]),
        CacheEvent::Stored(stored),
    );
    let removed = BlockRemoved {
        block_hashes: vec![7],
        medium: None,
        group_idx: None,
    };
    check(
        list(vec!["BlockRemoved".into(), numbers(&[7])]),
        CacheEvent::Removed(removed),
    );
    check(list(vec!["AllBlocksCleared".into()]), CacheEvent::AllCleared);
}

#[test]
fn unknown_events_are_counted() {
    let events = vec![
        map(vec![("type", "BlockMoved".into())]),
        list(vec!["X".into(), 1.into()]),
    ];
    let batch = decode(&list(vec![Value::from(1), list(events), 3.into()])).expect("a batch");
    assert_eq!(
        (batch.skipped, batch.events.len(), batch.data_parallel_rank),
        (2, 0, Some(3))
    );
}

#[test]
fn other_shapes_are_told_what_was_expected() {
    let check = |value: Value, field: &str| match decode(&value) {
        Err(KvEventError::Shape { field: found, .. }) => assert_eq!(found, field, "{value}"),
        other => panic!("{value}: {other:?}"),
    };
    let event = |event: Value| list(vec![Value::from(1.0), list(vec![event])]);
    let stored = |fields: Vec<Value>| event(list([vec!["BlockStored".into()], fields].concat()));
    check(Value::Nil, "batch");
    check(list(vec![]), "timestamp");
    check(list(vec![1.into()]), "events");
    check(event(1.into()), "event");
    check(event(list(vec![])), "event");
    check(event(map(vec![("kind", "x".into())])), "event");
    check(stored(vec![]), "block_hashes");
    check(stored(vec![list(vec!["x".into()])]), "block_hashes");
    check(
        stored(vec![numbers(&[1]), Value::Nil, numbers(&[1 << 32]), 1.into()]),
        "token_ids",
    );
    check(
        stored(vec![numbers(&[1]), Value::Nil, numbers(&[1]), 0.into()]),
        "block_size",
    );
    let deep = (0..2000).fold(Value::Nil, |inner, _| list(vec![inner]));
    assert!(
        matches!(decode(&list(vec![1.into(), deep])), Err(KvEventError::Msgpack(_))),
        "nested too deep"
    );
    let huge = EventBatch::decode(&vec![0; MAX_PAYLOAD_BYTES + 1]);
    assert_eq!(
        huge,
        Err(KvEventError::TooLong {
            bytes: MAX_PAYLOAD_BYTES + 1
        })
    );
    let announced = [0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdd, 0xff, 0xff, 0xff, 0xff];
    assert!(
        matches!(EventBatch::decode(&announced), Err(KvEventError::Msgpack(_))),
        "4 thousand million events"
    );
}

#[test]
fn private_blocks_are_told_apart() {
    let plain = BlockStored {
        extra_keys: vec![None, None],
        ..BlockStored::default()
    };
    assert!(!plain.is_private());
    assert!(
        BlockStored {
            extra_keys: vec![None, Some(vec!["salt".into()])],
            ..plain.clone()
        }
        .is_private()
    );
    assert!(
        BlockStored {
            lora_id: Some(1),
            ..plain
        }
        .is_private()
    );
}

/// A batch as SGLang 0.5.23 packs it (`disaggregation/kv_events.py`): an array of a time, maps, and the rank.
fn of_sglang(event: Vec<(&str, Value)>) -> Result<EventBatch, KvEventError> {
    let event = event
        .into_iter()
        .map(|(name, value)| (Value::from(name), value))
        .collect();
    let batch = Value::Array(vec![
        Value::from(1.5),
        Value::Array(vec![Value::Map(event)]),
        Value::from(3),
    ]);
    let mut payload = Vec::new();
    rmpv::encode::write_value(&mut payload, &batch).expect("memory takes it");
    EventBatch::decode(&payload)
}

#[test]
fn sglangs_events_are_read() {
    let ids = |ids: &[u32]| Value::Array(ids.iter().map(|id| Value::from(*id)).collect());
    let stored = |more: Vec<(&'static str, Value)>| {
        let mut event = vec![
            ("type", Value::from("BlockStored")),
            ("block_hashes", Value::Array(vec![Value::from(-7_i64)])),
            ("parent_block_hash", Value::Nil),
            ("token_ids", ids(&[5, 6])),
            ("block_size", Value::from(2)),
            ("lora_id", Value::Nil),
            ("medium", Value::from("CPU_PINNED")),
        ];
        event.retain(|(name, _)| more.iter().all(|(other, _)| other != name));
        event.extend(more);
        let batch = of_sglang(event).expect("SGLang's form");
        assert_eq!(batch.data_parallel_rank, Some(3));
        match batch.events.as_slice() {
            [CacheEvent::Stored(stored)] => stored.clone(),
            other => panic!("{other:?}"),
        }
    };
    let plain = stored(vec![("session_id", Value::from("s"))]);
    assert_eq!(
        plain.block_hashes,
        [(-7_i64).cast_unsigned()],
        "hashes are signed there"
    );
    assert_eq!(
        (plain.medium.as_deref(), plain.is_private()),
        (Some("CPU_PINNED"), false)
    );
    assert!(stored(vec![("cache_salt", Value::from("s"))]).is_private());
    assert!(stored(vec![("lora_name", Value::from("a"))]).is_private());
    let pairs = Value::Array(vec![ids(&[5, 6]), ids(&[6, 7])]);
    assert_eq!(stored(vec![("token_ids", pairs)]).token_ids, [5, 6]);
    let pairs = Value::Array(vec![ids(&[]), ids(&[6, 7])]);
    assert!(of_sglang(vec![("type", Value::from("BlockStored")), ("token_ids", pairs)]).is_err());
}

#[test]
fn replays_have_their_frames() {
    assert_eq!(Replay::decode_request(&Replay::encode_request(77)), Ok(77));
    let frame = Frame {
        topic: "kv@a@m".into(),
        sequence: 77,
        payload: Bytes::from_static(b"x"),
    };
    for message in [Replay::Batch(frame), Replay::End] {
        assert_eq!(Replay::decode(&message.encode()), Ok(message));
    }
    assert_eq!(Replay::End.encode()[2], vec![0xff; 8]);
    let frame = |bytes: &[u8]| Bytes::copy_from_slice(bytes);
    for wrong in [
        vec![],
        vec![frame(b"")],
        vec![frame(b"x"), frame(b""), frame(&[0; 8]), frame(b"")],
    ] {
        assert!(Replay::decode(&wrong).is_err(), "{wrong:?}");
        assert!(Replay::decode_request(&wrong).is_err(), "{wrong:?}");
    }
    assert!(
        Frame::decode(&[frame(b"t"), frame(&[0; 7]), frame(b"")]).is_err(),
        "seven bytes"
    );
}

prop_compose! {
    fn any_stored()(
        block_hashes in prop::collection::vec(any::<u64>(), 0..5),
        parent_block_hash in any::<Option<u64>>(),
        token_ids in prop::collection::vec(any::<u32>(), 0..40),
        block_size in 1..64_u32,
        lora_id in any::<Option<i64>>(),
        medium in any::<Option<String>>(),
        extra_keys in prop::collection::vec(prop::option::of(prop::collection::vec("[a-z]{1,5}", 1..3)), 0..3),
        group_idx in any::<Option<u32>>(),
    ) -> CacheEvent {
        let lora_name = lora_id.map(|id| id.to_string());
        CacheEvent::Stored(BlockStored {
            block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys, group_idx,
        })
    }
}

fn any_event() -> impl Strategy<Value = CacheEvent> {
    let removed = (
        prop::collection::vec(any::<u64>(), 0..5),
        any::<Option<String>>(),
        any::<Option<u32>>(),
    )
        .prop_map(|(block_hashes, medium, group_idx)| {
            CacheEvent::Removed(BlockRemoved {
                block_hashes,
                medium,
                group_idx,
            })
        });
    prop_oneof![any_stored(), removed, Just(CacheEvent::AllCleared)]
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(
        events in prop::collection::vec(any_event(), 0..6),
        timestamp in -1e12..1e12_f64,
        data_parallel_rank in any::<Option<u32>>(),
    ) {
        let batch = EventBatch { timestamp, events, data_parallel_rank, skipped: 0 };
        prop_assert_eq!(EventBatch::decode(&batch.encode()), Ok(batch));
    }

    #[test]
    fn garbage_never_panics(payload in prop::collection::vec(any::<u8>(), 0..200)) {
        let _result = EventBatch::decode(&payload);
    }

    #[test]
    fn a_garbled_batch_never_panics(line in 0_usize..5, places in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5)) {
        let mut payload = fixture().swap_remove(line).2;
        for (place, byte) in places {
            *place.get_mut(&mut payload) = byte;
        }
        let _result = EventBatch::decode(&payload);
        let cut = payload.len() / 2;
        prop_assert!(EventBatch::decode(&payload[..cut]).is_err(), "half a batch is none");
    }
}
