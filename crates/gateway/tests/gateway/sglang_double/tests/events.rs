//! The double's KV events, as a subscriber of SGLang's would read them.

use super::super::cache::encode;
use super::super::{Change, EventForm, Mode, Sglang, Spec};
use super::{caller, completion, ids, with};
use crate::support::engine::PATIENCE;
use rmpv::Value as Packed;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// Subscribes to a rank and reads what comes.
struct Listener {
    socket: SubSocket,
}

impl Listener {
    async fn connect(port: u16) -> Self {
        let mut socket = SubSocket::new();
        socket.connect(&format!("tcp://127.0.0.1:{port}")).await.unwrap();
        socket.subscribe("").await.unwrap();
        Self { socket }
    }

    async fn next(&mut self) -> (u64, Packed) {
        let message = tokio::time::timeout(PATIENCE, self.socket.recv())
            .await
            .expect("an event comes")
            .unwrap();
        let frames = message.into_vec();
        let [topic, sequence, payload] = &frames[..] else {
            panic!("three frames: {frames:?}");
        };
        assert!(topic.is_empty());
        let sequence = u64::from_be_bytes(sequence[..].try_into().unwrap());
        (sequence, rmpv::decode::read_value(&mut &payload[..]).unwrap())
    }
}

fn field<'a>(event: &'a Packed, name: &str) -> &'a Packed {
    let fields = event.as_map().unwrap();
    &fields
        .iter()
        .find(|(key, _)| key.as_str() == Some(name))
        .unwrap_or_else(|| panic!("{name} in {event}"))
        .1
}

/// All batches that a rank keeps, in order from 0.
async fn replayed(port: u16) -> Vec<Packed> {
    let mut dealer = DealerSocket::new();
    dealer.connect(&format!("tcp://127.0.0.1:{}", port)).await.unwrap();
    let request = vec![bytes::Bytes::new(), bytes::Bytes::copy_from_slice(&0_u64.to_be_bytes())];
    dealer.send(ZmqMessage::try_from(request).unwrap()).await.unwrap();
    let mut events = Vec::new();
    loop {
        let frames = tokio::time::timeout(PATIENCE, dealer.recv())
            .await
            .expect("a replay comes")
            .unwrap()
            .into_vec();
        let [empty, _topic, sequence, payload] = &frames[..] else {
            panic!("four frames: {frames:?}")
        };
        assert!(empty.is_empty());
        if sequence[..] == [0xFF; 8] {
            break;
        }
        assert_eq!(sequence[..], (events.len() as u64).to_be_bytes());
        events.push(rmpv::decode::read_value(&mut &payload[..]).unwrap());
    }
    events
}

#[tokio::test]
async fn events_are_published_per_rank_and_replayed() {
    let mut spec = Spec::new(Mode::Null);
    spec.dp_size = 2;
    let server = Sglang::start(spec, &Arc::default()).await;
    assert_eq!(server.spec().dp_size, 2);
    let info = caller(&server).get("/server_info").await.json();
    let port = |name: &str| u16::try_from(info["kv_events"][name].as_u64().unwrap()).unwrap();
    let mut second = Listener::connect(port("endpoint_port_base") + 1).await;
    let prompt = ids(1, 40);
    let ask = async |rank: u32| {
        let body = with(completion(&prompt, 10), &json!({"routed_dp_rank": rank}));
        assert_eq!(caller(&server).post("/v1/completions", &body).await.status, 200);
    };
    // A subscription takes hold some time after it was made; what happened before is not heard.
    let (mut heard, mut tries) = (None, 0);
    while heard.is_none() && tries < 200 {
        ask(1).await;
        tries += 1;
        heard = tokio::time::timeout(Duration::from_millis(50), second.next())
            .await
            .ok();
        server.evict(&prompt, 0);
    }
    let (_, batch) = heard.expect("an event was heard");
    let parts = batch.as_array().unwrap();
    assert_eq!(
        (parts.len(), parts[2].as_u64()),
        (3, Some(1)),
        "time, events, rank: {batch}"
    );
    let event = &parts[1].as_array().unwrap()[0];
    assert!(
        matches!(field(event, "type").as_str(), Some("BlockStored" | "BlockRemoved")),
        "{event}"
    );
    // Everything again, from the other rank, which nobody listened to; what the network lost is there, too.
    server.lose_events(true);
    ask(0).await;
    server.lose_events(false);
    server.evict(&prompt, 1);
    let events = replayed(port("replay_endpoint_port_base")).await;
    let of = |index: usize| events[index].as_array().unwrap()[1].as_array().unwrap()[0].clone();
    let stored = of(0);
    assert_eq!(field(&stored, "token_ids").as_array().unwrap().len(), 32);
    assert_eq!(
        (field(&stored, "parent_block_hash"), field(&stored, "lora_id")),
        (&Packed::Nil, &Packed::Nil)
    );
    assert_eq!(
        (field(&stored, "block_size").as_u64(), field(&stored, "medium").as_str()),
        (Some(16), Some("GPU"))
    );
    let grown = of(1);
    assert_eq!(
        field(&grown, "parent_block_hash"),
        &field(&stored, "block_hashes").as_array().unwrap()[1],
        "its answer's page"
    );
    assert_eq!(field(&of(2), "type").as_str(), Some("BlockRemoved"));
    assert_eq!(events.len(), 3);
}

#[tokio::test]
async fn the_older_form_of_events_is_an_array() {
    let bytes = encode(&[Change::Cleared, Change::Removed(vec![-3])], 0, 16, EventForm::Array);
    let batch = rmpv::decode::read_value(&mut &bytes[..]).unwrap();
    let events = batch.as_array().unwrap()[1].as_array().unwrap();
    assert_eq!(events[0], Packed::Array(vec![Packed::from("AllBlocksCleared")]));
    assert_eq!(
        events[1],
        Packed::Array(vec![
            Packed::from("BlockRemoved"),
            Packed::Array(vec![Packed::from(-3)])
        ])
    );
}
