//! The sockets of an engine's KV events: the subscription, and the replay of what was missed. Whatever takes too long is an
//! error; what the messages mean is the feed's business.

use super::source::EventSource;
use bytes::Bytes;
use homing_wire::kv_events::{Frame, Replay};
use std::time::Duration;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// How long making a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an engine may take for the next message of a replay.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(5);

/// Subscribes to all that an engine publishes.
pub(super) async fn subscribe(source: &EventSource) -> Result<SubSocket, String> {
    let mut socket = SubSocket::new();
    match source {
        EventSource::Connect(endpoint) => within(CONNECT_TIMEOUT, socket.connect(endpoint)).await?,
        EventSource::Bind(endpoint) => drop(within(CONNECT_TIMEOUT, socket.bind(endpoint)).await?),
    }
    within(CONNECT_TIMEOUT, socket.subscribe("")).await?;
    Ok(socket)
}

/// A replay under way.
pub(super) struct Replaying(DealerSocket);

impl Replaying {
    /// Asks an engine for all batches from a number on.
    pub(super) async fn begin(endpoint: &str, from: u64) -> Result<Self, String> {
        let mut socket = DealerSocket::new();
        within(CONNECT_TIMEOUT, socket.connect(endpoint)).await?;
        let request = ZmqMessage::try_from(Replay::encode_request(from).to_vec()).map_err(|error| error.to_string())?;
        within(CONNECT_TIMEOUT, socket.send(request)).await?;
        Ok(Self(socket))
    }

    /// The next batch; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<Frame>, String> {
        let message = within(REPLAY_TIMEOUT, self.0.recv()).await?;
        match Replay::decode(&frames(&message)).map_err(|error| error.to_string())? {
            Replay::End => Ok(None),
            Replay::Batch(frame) => Ok(Some(frame)),
        }
    }
}

async fn within<T>(timeout: Duration, work: impl Future<Output = Result<T, zeromq::ZmqError>>) -> Result<T, String> {
    match tokio::time::timeout(timeout, work).await {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {timeout:?}")),
    }
}

/// The frames of a message.
pub(super) fn frames(message: &ZmqMessage) -> Vec<Bytes> {
    message.iter().cloned().collect()
}
