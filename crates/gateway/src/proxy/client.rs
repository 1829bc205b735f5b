//! The client's end of a request: nothing yet, then a whole answer, or a stream that ends. It notices a client that
//! has gone and one that does not read.
//!
//! A stream holds one piece at most that the client has not taken: while it does, nothing is read from the engine, so a
//! slow client slows its own answer down and costs no memory.

use crate::error::Rejection;
use crate::upstream::Answer;
use bytes::Bytes;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// Pieces between a request's task and its connection.
const PIECES: usize = 16;

/// What the router adds to an answer's headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RouteHeaders {
    pub(crate) request: String,
    pub(crate) session: Option<String>,
    pub(crate) path: Option<&'static str>,
    pub(crate) worker: Option<String>,
    pub(crate) cached_tokens: Option<u32>,
}

/// The beginning of an answer; everything but a stream is its end as well.
#[derive(Debug)]
pub(crate) enum Head {
    /// Server-sent events follow.
    Stream(RouteHeaders, mpsc::Receiver<Bytes>),
    /// The whole answer.
    Whole(RouteHeaders, Bytes),
    /// The engine's own refusal.
    Refused(RouteHeaders, Answer),
    /// An error of the router's.
    Rejected(RouteHeaders, Rejection),
}

/// The client's end.
#[derive(Debug)]
pub(crate) struct Client {
    state: State,
    /// What the client has not taken yet, and when it must have.
    pending: Option<(Bytes, Instant)>,
    /// It was given a piece of its answer.
    has_part: bool,
    stall: Duration,
}

#[derive(Debug)]
enum State {
    Waiting(oneshot::Sender<Head>),
    Streaming(mpsc::Sender<Bytes>),
    Over,
}

/// What has become of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// It took what was pending.
    Taken,
    /// It hung up, or takes nothing any more.
    Gone,
}

impl Client {
    /// `stall` is how long a client may leave a piece of its stream untaken.
    pub(crate) fn new(stall: Duration) -> (Self, oneshot::Receiver<Head>) {
        let (head, receiver) = oneshot::channel();
        (
            Self {
                state: State::Waiting(head),
                pending: None,
                has_part: false,
                stall,
            },
            receiver,
        )
    }

    /// Whether the client has seen the beginning of a stream, so that all that follows is said in it.
    pub(crate) fn is_streaming(&self) -> bool {
        matches!(self.state, State::Streaming(_))
    }

    /// Whether the client has a piece of its answer: a stream may begin with signs of life alone.
    pub(crate) fn has_part(&self) -> bool {
        self.has_part
    }

    /// Whether nothing more can be sent now.
    pub(crate) fn is_blocked(&self) -> bool {
        self.pending.is_some()
    }

    /// Begins the stream, where it has not begun.
    pub(crate) fn begin_stream(&mut self, headers: impl FnOnce() -> RouteHeaders) {
        if matches!(self.state, State::Waiting(_)) {
            let (sender, receiver) = mpsc::channel(PIECES);
            self.answer(Head::Stream(headers(), receiver));
            self.state = State::Streaming(sender);
        }
    }

    /// Answers a client that has seen nothing yet.
    pub(crate) fn answer(&mut self, head: Head) {
        if let State::Waiting(sender) = std::mem::replace(&mut self.state, State::Over) {
            // A client that hung up meanwhile has no use for it.
            drop(sender.send(head));
        }
    }

    /// Adds a piece to the stream; it is sent by [`Client::flow`].
    pub(crate) fn push(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        self.has_part = true;
        self.append(piece);
    }

    /// Adds a sign of life to the stream, which is no piece of the answer.
    pub(crate) fn ping(&mut self, sign: Bytes) {
        self.append(sign);
    }

    fn append(&mut self, piece: Bytes) {
        let pending = match self.pending.take() {
            None => piece,
            Some((earlier, _)) => [earlier, piece].concat().into(),
        };
        self.pending = Some((pending, Instant::now() + self.stall));
    }

    /// Ends the stream; what is pending must have been taken before.
    pub(crate) fn end(&mut self) {
        self.state = State::Over;
    }

    /// Waits until something becomes of the client. Loses nothing when dropped.
    pub(crate) async fn flow(&mut self) -> Flow {
        match (&mut self.state, &mut self.pending) {
            (State::Over, _) => std::future::pending().await,
            (State::Waiting(head), _) => head.closed().await,
            (State::Streaming(body), None) => body.closed().await,
            (State::Streaming(body), pending @ Some(_)) => {
                let until = pending.as_ref().map_or_else(Instant::now, |(_, until)| *until);
                if let Ok(Ok(permit)) = tokio::time::timeout_at(until, body.reserve()).await {
                    if let Some((piece, _)) = pending.take() {
                        permit.send(piece);
                    }
                    return Flow::Taken;
                }
            }
        }
        Flow::Gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_that_takes_nothing_counts_as_gone() {
        let (mut client, head) = Client::new(Duration::ZERO);
        client.begin_stream(RouteHeaders::default);
        let Head::Stream(_, mut body) = head.await.unwrap() else {
            panic!("expected a stream")
        };
        for _ in 0..PIECES {
            client.push(Bytes::from_static(b"a"));
            assert_eq!(client.flow().await, Flow::Taken);
        }
        client.push(Bytes::from_static(b"b"));
        assert!(client.is_blocked());
        assert_eq!(
            client.flow().await,
            Flow::Gone,
            "the connection holds all it may and takes nothing"
        );
        body.recv().await.unwrap();
        client.push(Bytes::from_static(b"c"));
        assert_eq!(
            client.flow().await,
            Flow::Taken,
            "a client that reads again is served on"
        );
    }

    #[tokio::test]
    async fn a_client_that_hangs_up_is_noticed_before_and_in_its_stream() {
        let (mut client, head) = Client::new(Duration::from_secs(60));
        drop(head);
        assert_eq!(client.flow().await, Flow::Gone);
        let (mut client, head) = Client::new(Duration::from_secs(60));
        client.begin_stream(RouteHeaders::default);
        drop(head.await.unwrap());
        assert_eq!(client.flow().await, Flow::Gone);
    }
}
