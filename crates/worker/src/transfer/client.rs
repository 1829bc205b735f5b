//! The puller's side: fetches what a request needs, stores it, and acknowledges.

use super::{CHUNK_BYTES, CONNECT_TIMEOUT, IDLE_TIMEOUT};
use crate::engine_thread::{EngineHandle, PullSource};
use crate::executor::PullOrder;
use bytes::Bytes;
use homing_engine::api::ImportError;
use homing_units::RequestId;
use homing_wire::kv_frames::{Message, PullError, PullRequest, Pulled, Puller, Refusal};
use std::io;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Bytes that are read from the socket at once.
const READ_BYTES: usize = 256 << 10;

/// What every pull of a worker needs.
#[derive(Clone)]
pub struct PullContext {
    /// The worker's engine.
    pub engine: EngineHandle,
    /// Bytes of a block's payload here.
    pub block_bytes: u32,
}

/// A pull failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("no connection: {0}")]
    Connection(#[from] io::Error),
    #[error("the source was silent for too long")]
    Silent(#[from] tokio::time::error::Elapsed),
    #[error(transparent)]
    Pull(#[from] PullError),
    #[error("blocks could not be stored: {0:?}")]
    Store(ImportError),
}

/// Pulls what `order` says from `source` and reports to the engine.
pub async fn pull(context: PullContext, order: PullOrder, source: PullSource) {
    let id = order.id;
    let outcome = context.pull(&order, &source).await;
    if let Err(failure) = &outcome {
        let (host, port) = (&source.host, source.port);
        tracing::warn!(request = id.0, host, port, %failure, "a pull of kv failed");
    }
    context
        .engine
        .import_done(id, outcome.map_err(|failure| failure.reason()));
}

/// Tells a source that nothing (more) will be pulled: it may release the blocks. Without an answer the lease will do.
pub async fn release(source: PullSource) {
    let request = PullRequest {
        block_bytes: 0,
        ..request(&source, 0, 0)
    };
    let released = async {
        let mut stream = connect(&source).await?;
        let mut puller = Puller::new(request);
        stream.write_all(&puller.request()).await?;
        while !matches!(next(&mut stream, &mut puller, &mut Vec::new()).await?, Pulled::Done) {}
        stream.write_all(&Message::Ack.encode()).await?;
        close(stream).await;
        Ok::<(), Failure>(())
    };
    if let Err(failure) = released.await {
        tracing::debug!(host = source.host, port = source.port, %failure, "an export was not released early");
    }
}

impl PullContext {
    async fn pull(&self, order: &PullOrder, source: &PullSource) -> Result<(), Failure> {
        let mut stream = connect(source).await?;
        let wanted = PullRequest {
            block_bytes: self.block_bytes,
            ..request(source, order.first_block, order.blocks)
        };
        let mut puller = Puller::new(wanted);
        timeout(IDLE_TIMEOUT, stream.write_all(&puller.request())).await??;
        // A modelled transfer takes its time whether its few bytes are here or not.
        let waited = tokio::time::sleep(order.wait);
        self.store_all(order, &mut stream, &mut puller).await?;
        waited.await;
        // Every block is verified and stored: from here on the request does not need the source any more, so a lost
        // acknowledgement costs the source its lease and nothing else.
        match timeout(IDLE_TIMEOUT, stream.write_all(&Message::Ack.encode())).await {
            Ok(Ok(())) => close(stream).await,
            _ => tracing::info!(
                request = order.id.0,
                "a pull was not acknowledged; the source's lease will end it"
            ),
        }
        Ok(())
    }

    async fn store_all(&self, order: &PullOrder, stream: &mut TcpStream, puller: &mut Puller) -> Result<(), Failure> {
        let mut buffer = vec![0; READ_BYTES];
        let mut batch = Batch {
            first: order.first_block,
            payloads: Vec::new(),
            bytes: 0,
        };
        loop {
            match next(stream, puller, &mut buffer).await? {
                Pulled::Block { data, .. } => {
                    batch.bytes += data.len();
                    batch.payloads.push(data);
                    if batch.bytes >= CHUNK_BYTES {
                        self.store(order.id, &mut batch).await?;
                    }
                }
                Pulled::Done => return self.store(order.id, &mut batch).await,
            }
        }
    }

    async fn store(&self, id: RequestId, batch: &mut Batch) -> Result<(), Failure> {
        let payloads = std::mem::take(&mut batch.payloads);
        let count = u32::try_from(payloads.len()).expect("a pool has fewer than 2^32 blocks");
        self.engine
            .write_import(id, batch.first, payloads)
            .await
            .map_err(Failure::Store)?;
        batch.first += count;
        batch.bytes = 0;
        Ok(())
    }
}

/// Verified blocks on their way to the engine thread.
struct Batch {
    first: u32,
    payloads: Vec<Bytes>,
    bytes: usize,
}

impl Failure {
    fn reason(&self) -> ImportError {
        match self {
            Self::Connection(_) => ImportError::Unreachable,
            Self::Silent(_) => ImportError::TimedOut,
            Self::Pull(PullError::Frame(_) | PullError::Protocol { .. }) => ImportError::Corrupt,
            // The worker is there, but not for this now: as good as out of reach, and worth another try.
            Self::Pull(PullError::Refused(Refusal::Busy)) => ImportError::Unreachable,
            Self::Pull(PullError::Refused(Refusal::BlockBytesMismatch { .. })) => ImportError::Corrupt,
            Self::Pull(PullError::Refused(
                Refusal::UnknownExport
                | Refusal::EpochMismatch { .. }
                | Refusal::PromptMismatch
                | Refusal::BadRange { .. },
            )) => ImportError::Unknown,
            Self::Store(reason) => *reason,
        }
    }
}

fn request(source: &PullSource, first_block: u32, count: u32) -> PullRequest {
    PullRequest {
        epoch: source.epoch,
        request: source.request.clone(),
        prompt: source.prompt,
        first_block,
        count,
        block_bytes: 0,
    }
}

async fn connect(source: &PullSource) -> Result<TcpStream, Failure> {
    let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect((source.host.as_str(), source.port))).await??;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The next thing that the source says.
async fn next(stream: &mut TcpStream, puller: &mut Puller, buffer: &mut Vec<u8>) -> Result<Pulled, Failure> {
    if buffer.is_empty() {
        buffer.resize(READ_BYTES, 0);
    }
    loop {
        if let Some(pulled) = puller.poll()? {
            return Ok(pulled);
        }
        let length = timeout(IDLE_TIMEOUT, stream.read(buffer)).await??;
        if length == 0 {
            return Err(Failure::Connection(io::ErrorKind::UnexpectedEof.into()));
        }
        puller.push(&buffer[..length]);
    }
}

/// Waits until the source has read the last frame and closed: closing first could reset the connection and lose it.
async fn close(mut stream: TcpStream) {
    let _ = stream.shutdown().await;
    let _ = timeout(IDLE_TIMEOUT, stream.read(&mut [0; 1])).await;
}
