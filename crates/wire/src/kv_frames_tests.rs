//! A pull from both sides, and every byte of it flipped.

use super::*;
use proptest::prelude::*;

fn request() -> PullRequest {
    PullRequest {
        epoch: BootEpoch(7),
        request: "cmpl-1-0-a36ca5a1".to_owned(),
        prompt: BlockHash(u128::MAX / 3),
        first_block: 2,
        count: 3,
        block_bytes: 40,
    }
}

/// What a holder answers to [`request`].
fn answer() -> Vec<Message> {
    let block = |index: u32| Message::Block {
        index,
        data: Bytes::from(vec![u8::try_from(index).expect("small"); 40]),
    };
    vec![Message::Accepted, block(2), block(3), block(4)]
}

fn encode(messages: &[Message]) -> Vec<u8> {
    messages.iter().flat_map(|message| message.encode().to_vec()).collect()
}

/// Everything a puller learns from these bytes, in chunks of this size.
fn pull(bytes: &[u8], chunk: usize) -> Result<Vec<Pulled>, PullError> {
    let mut puller = Puller::new(request());
    let mut learnt = Vec::new();
    for chunk in bytes.chunks(chunk) {
        puller.push(chunk);
        while let Some(news) = puller.poll()? {
            learnt.push(news);
        }
    }
    Ok(learnt)
}

fn decode(bytes: &[u8]) -> Result<Option<Message>, FrameError> {
    let mut decoder = FrameDecoder::new(MAX_CONTROL_BYTES);
    decoder.push(bytes);
    decoder.poll()
}

#[test]
fn a_pull_gives_the_blocks_in_order() {
    let bytes = encode(&answer());
    for chunk in [1, 7, bytes.len()] {
        let learnt = pull(&bytes, chunk).expect("nothing is wrong");
        let indices: Vec<_> = learnt
            .iter()
            .map(|news| match news {
                Pulled::Block { index, data } => Some((*index, data.len())),
                Pulled::Done => None,
            })
            .collect();
        assert_eq!(
            indices,
            [Some((2, 40)), Some((3, 40)), Some((4, 40)), None],
            "in chunks of {chunk}"
        );
    }
    assert_eq!(
        decode(&Puller::new(request()).request()),
        Ok(Some(Message::Request(request())))
    );
    let mut nothing = Puller::new(PullRequest { count: 0, ..request() });
    nothing.push(&Message::Accepted.encode());
    assert_eq!(nothing.poll(), Ok(Some(Pulled::Done)), "a release without a pull");
}

#[test]
fn every_flipped_byte_is_refused() {
    let bytes = encode(&answer());
    for place in 0..bytes.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut garbled = bytes.clone();
            garbled[place] ^= flip;
            let result = pull(&garbled, garbled.len());
            assert!(result.is_err(), "byte {place} xor {flip:#x} passed: {result:?}");
        }
    }
    for message in [
        Message::Request(request()),
        Message::Ack,
        Message::Refused(Refusal::Busy),
    ] {
        let bytes = message.encode();
        for place in 0..bytes.len() {
            let mut garbled = bytes.to_vec();
            garbled[place] ^= 0x10;
            assert!(decode(&garbled).is_err(), "{message:?}, byte {place}");
        }
    }
}

#[test]
fn errors_say_what_was_wrong() {
    let mut frame = Message::Ack.encode().to_vec();
    assert_eq!(decode(b"GET / HTTP/1.1\r\nhost: x\r\n"), Err(FrameError::Magic));
    frame[10] ^= 1;
    assert_eq!(decode(&frame), Err(FrameError::HeaderChecksum));
    let of = |version: u16, kind: u16, payload: &[u8]| {
        let mut frame = BytesMut::from(&MAGIC[..]);
        frame.put_u16_le(version);
        frame.put_u16_le(kind);
        frame.put_u32_le(u32::try_from(payload.len()).expect("small"));
        let check = xxh3_64(&frame);
        frame.put_u64_le(check);
        frame.put_slice(payload);
        frame.put_u64_le(xxh3_64_with_seed(payload, check));
        decode(&frame)
    };
    assert_eq!(of(2, 5, b""), Err(FrameError::Version { found: 2 }));
    assert_eq!(
        of(1, 5, &[0; 1025]),
        Err(FrameError::TooLong {
            length: 1025,
            limit: MAX_CONTROL_BYTES
        })
    );
    assert_eq!(of(1, 5, b"x"), Err(FrameError::Content { kind: 5 }));
    assert_eq!(of(1, 9, b""), Err(FrameError::Content { kind: 9 }));
    assert_eq!(of(1, 3, &[9; 12]), Err(FrameError::Content { kind: 3 }));
    assert_eq!(of(1, 1, &[0; 36 + 257]), Err(FrameError::Content { kind: 1 }));
    assert_eq!(
        of(1, 1, &[0xff; 40]),
        Err(FrameError::Content { kind: 1 }),
        "an id that is no UTF-8"
    );
    assert_eq!(
        decode(&Message::Ack.encode()[..10]),
        Ok(None),
        "half a frame is waited for"
    );
}

#[test]
fn a_failed_decoder_stays_failed() {
    let mut decoder = FrameDecoder::new(MAX_CONTROL_BYTES);
    let mut garbled = Message::Ack.encode().to_vec();
    *garbled.last_mut().expect("a frame has a trailer") ^= 1;
    decoder.push(&garbled);
    assert_eq!(decoder.poll(), Err(FrameError::PayloadChecksum));
    decoder.push(&Message::Ack.encode());
    assert_eq!(decoder.poll(), Err(FrameError::PayloadChecksum));
}

#[test]
fn a_holder_that_breaks_the_protocol_is_refused() {
    let block = |index: u32, bytes: usize| Message::Block {
        index,
        data: Bytes::from(vec![0; bytes]),
    };
    let check = |messages: &[Message], expected: &str| match pull(&encode(messages), 4096) {
        Err(PullError::Protocol { expected: found }) => assert_eq!(found, expected, "{messages:?}"),
        other => panic!("{messages:?}: {other:?}"),
    };
    check(&[block(2, 40)], "an acceptance or a refusal");
    check(&[Message::Accepted, Message::Accepted], "a block");
    check(&[Message::Accepted, block(3, 40)], "the blocks in order");
    check(&[Message::Accepted, block(2, 40), block(2, 40)], "the blocks in order");
    check(&[Message::Accepted, block(2, 39)], "a block of the size asked for");
    check(&[answer(), vec![Message::Ack]].concat(), "nothing after the last block");
    let refusal = Refusal::EpochMismatch { actual: BootEpoch(8) };
    assert_eq!(
        pull(&encode(&[Message::Refused(refusal)]), 4096),
        Err(PullError::Refused(refusal))
    );
}

fn any_message() -> impl Strategy<Value = Message> {
    let request = (
        any::<u64>(),
        "\\PC{0,60}",
        any::<u128>(),
        any::<u32>(),
        any::<u32>(),
        any::<u32>(),
    )
        .prop_map(|(epoch, request, prompt, first_block, count, block_bytes)| {
            let (epoch, prompt) = (BootEpoch(epoch), BlockHash(prompt));
            Message::Request(PullRequest {
                epoch,
                request,
                prompt,
                first_block,
                count,
                block_bytes,
            })
        });
    let refusal = prop_oneof![
        Just(Refusal::UnknownExport),
        any::<u64>().prop_map(|actual| Refusal::EpochMismatch {
            actual: BootEpoch(actual)
        }),
        Just(Refusal::PromptMismatch),
        any::<u32>().prop_map(|available| Refusal::BadRange { available }),
        any::<u32>().prop_map(|actual| Refusal::BlockBytesMismatch { actual }),
        Just(Refusal::Busy),
    ];
    let block = (any::<u32>(), prop::collection::vec(any::<u8>(), 0..200)).prop_map(|(index, data)| Message::Block {
        index,
        data: Bytes::from(data),
    });
    prop_oneof![
        request,
        refusal.prop_map(Message::Refused),
        block,
        Just(Message::Accepted),
        Just(Message::Ack)
    ]
}

proptest! {
    #[test]
    fn any_chunking_gives_the_same_messages(
        messages in prop::collection::vec(any_message(), 0..8),
        chunk in 1_usize..100,
    ) {
        let mut decoder = FrameDecoder::new(MAX_CONTROL_BYTES);
        let mut decoded = Vec::new();
        for chunk in encode(&messages).chunks(chunk) {
            decoder.push(chunk);
            while let Some(message) = decoder.poll().expect("nothing is wrong") {
                decoded.push(message);
            }
        }
        prop_assert!(decoder.is_empty());
        prop_assert_eq!(decoded, messages);
    }

    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _result = decode(&bytes);
        let _result = decode(&[&MAGIC[..], &bytes].concat());
    }
}
