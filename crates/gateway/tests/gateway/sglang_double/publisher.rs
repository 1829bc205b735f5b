//! A rank's KV events over ZeroMQ: SGLang's `ZmqEventPublisher`, a PUB socket and a ROUTER for replays.
//!
//! Rank `r` binds `port + r` (`offset_endpoint_port`); messages are `(topic, sequence, payload)` with the sequence as eight
//! big-endian bytes from 0; a replay of `("", first sequence)` answers `("", topic, sequence, payload)` for each kept batch
//! and ends with `("", "", -1, "")`. Nothing is sent before something happened, and what nobody hears is lost unless
//! it is asked for.

use bytes::Bytes;
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use zeromq::{Endpoint, PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Tries to find a row of free ports.
const PORT_TRIES: usize = 50;

/// What a rank publishes with.
#[derive(Clone)]
pub struct Publisher {
    batches: mpsc::UnboundedSender<Batch>,
}

enum Batch {
    Publish(Vec<u8>),
    /// It gets a number and is kept for replays, but nobody hears of it.
    Lose(Vec<u8>),
}

/// The sockets of all ranks, and where the first ones are.
pub struct Publishers {
    pub ranks: Vec<Publisher>,
    /// They end with the life that they were bound for, and then the ports are free.
    pub tasks: Vec<JoinHandle<()>>,
    pub port: u16,
    pub replay_port: Option<u16>,
}

impl Publisher {
    pub fn publish(&self, payload: Vec<u8>) {
        drop(self.batches.send(Batch::Publish(payload)));
    }

    /// A batch that the network loses.
    pub fn lose(&self, payload: Vec<u8>) {
        drop(self.batches.send(Batch::Lose(payload)));
    }
}

impl Publishers {
    /// Binds the sockets of `count` ranks, at `ports` where an earlier life had them.
    pub async fn bind(count: u32, ports: Option<(u16, Option<u16>)>, replays: bool, life: &CancellationToken) -> Self {
        let mut pubs = row::<PubSocket>(count, ports.map(|ports| ports.0)).await;
        let mut routers = match replays {
            true => Some(row::<RouterSocket>(count, ports.and_then(|ports| ports.1)).await),
            false => None,
        };
        let (port, replay_port) = (pubs.0, routers.as_ref().map(|row| row.0));
        let (mut ranks, mut tasks) = (Vec::new(), Vec::new());
        for socket in pubs.1.drain(..) {
            let kept = Arc::new(Mutex::new(Vec::<Bytes>::new()));
            if let Some(row) = &mut routers {
                tasks.push(tokio::spawn(serve_replays(
                    row.1.remove(0),
                    Arc::clone(&kept),
                    life.clone(),
                )));
            }
            let (batches, incoming) = mpsc::unbounded_channel();
            tasks.push(tokio::spawn(serve(socket, kept, incoming, life.clone())));
            ranks.push(Publisher { batches });
        }
        Self {
            ranks,
            tasks,
            port,
            replay_port,
        }
    }
}

/// `count` sockets at consecutive ports.
async fn row<S: Socket>(count: u32, port: Option<u16>) -> (u16, Vec<S>) {
    'tries: for _ in 0..PORT_TRIES {
        let mut first = S::new();
        let Ok(Endpoint::Tcp(_, base)) = first.bind(&format!("tcp://127.0.0.1:{}", port.unwrap_or(0))).await else {
            continue;
        };
        let mut sockets = vec![first];
        for rank in 1..count {
            let mut socket = S::new();
            let next = u32::from(base) + rank;
            if socket.bind(&format!("tcp://127.0.0.1:{next}")).await.is_err() {
                continue 'tries;
            }
            sockets.push(socket);
        }
        return (base, sockets);
    }
    panic!("no row of {count} free ports at {port:?}");
}

async fn serve(
    mut events: PubSocket,
    kept: Arc<Mutex<Vec<Bytes>>>,
    mut incoming: mpsc::UnboundedReceiver<Batch>,
    life: CancellationToken,
) {
    while let Some(Some(batch)) = life.run_until_cancelled(incoming.recv()).await {
        let (payload, is_heard) = match batch {
            Batch::Publish(payload) => (Bytes::from(payload), true),
            Batch::Lose(payload) => (Bytes::from(payload), false),
        };
        let sequence = {
            let mut kept = kept.lock().unwrap();
            kept.push(payload.clone());
            kept.len() as u64 - 1
        };
        if is_heard {
            drop(events.send(message([Bytes::new(), number(sequence), payload])).await);
        }
    }
    drop(events.close().await);
}

async fn serve_replays(mut router: RouterSocket, kept: Arc<Mutex<Vec<Bytes>>>, life: CancellationToken) {
    while let Some(Ok(request)) = life.run_until_cancelled(router.recv()).await {
        let frames = request.into_vec();
        // Other requests are passed over with a warning there.
        let [client, _, start] = &frames[..] else { continue };
        let start = <[u8; 8]>::try_from(&start[..]).map_or(0, u64::from_be_bytes);
        let batches: Vec<Bytes> = kept.lock().unwrap().clone();
        for (sequence, payload) in (0..).zip(batches).skip_while(|(sequence, _)| *sequence < start) {
            let frames = [client.clone(), Bytes::new(), Bytes::new(), number(sequence), payload];
            drop(router.send(message(frames)).await);
        }
        let end = [
            client.clone(),
            Bytes::new(),
            Bytes::new(),
            number(u64::MAX),
            Bytes::new(),
        ];
        drop(router.send(message(end)).await);
    }
    drop(router.close().await);
}

fn number(sequence: u64) -> Bytes {
    Bytes::copy_from_slice(&sequence.to_be_bytes())
}

fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    ZmqMessage::try_from(frames.to_vec()).expect("a message has a frame")
}
