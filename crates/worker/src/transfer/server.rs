//! The holder's side: serves exports.

use super::{CHUNK_BYTES, IDLE_TIMEOUT};
use crate::engine_thread::EngineHandle;
use bytes::BytesMut;
use homing_units::{BootEpoch, RequestId};
use homing_wire::kv_frames::{FrameDecoder, MAX_CONTROL_BYTES, Message, PullRequest, Refusal};
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Pulls that are served at once; more are refused as busy.
const PULLS_MAX: usize = 64;
/// Bytes of frames that are written at once.
const WRITE_BYTES: usize = 256 << 10;
/// Connections that are open at once, those included that are being told "busy"; more wait to be accepted.
const CONNECTIONS_MAX: usize = 2 * PULLS_MAX;

/// The names under which exports are known to other workers: unique in this life, and checked against its epoch.
#[derive(Clone, Debug)]
pub struct ExportIds {
    epoch: BootEpoch,
}

impl ExportIds {
    /// The names of this life.
    #[must_use]
    pub fn new(epoch: BootEpoch) -> Self {
        Self { epoch }
    }

    /// This life.
    #[must_use]
    pub fn epoch(&self) -> BootEpoch {
        self.epoch
    }

    /// The name of a request whose client calls it `name`.
    #[must_use]
    pub fn encode(&self, name: &str, id: RequestId) -> String {
        format!("{name}-{}-{:x}", id.0, self.epoch.0)
    }

    /// The request that a name is of, where it is of this life.
    #[must_use]
    pub fn decode(&self, text: &str) -> Option<RequestId> {
        let mut parts = text.rsplitn(3, '-');
        let (epoch, id) = (parts.next()?, parts.next()?);
        let epoch = u64::from_str_radix(epoch, 16).ok()?;
        (epoch == self.epoch.0).then_some(RequestId(id.parse().ok()?))
    }
}

/// Serves pulls until `stop`.
pub async fn serve(
    listener: TcpListener,
    engine: EngineHandle,
    block_bytes: u32,
    ids: ExportIds,
    stop: CancellationToken,
) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let holder = Holder {
        engine,
        block_bytes,
        ids,
        pulls: Arc::new(Semaphore::new(PULLS_MAX)),
    };
    let tasks = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &connections) => accepted,
            () = stop.cancelled() => break,
        };
        let (stream, peer, place) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a transfer connection was not accepted");
                continue;
            }
        };
        let (holder, stop) = (holder.clone(), stop.clone());
        tasks.spawn(async move {
            let _place = place;
            let served = tokio::select! {
                served = holder.serve(stream) => served,
                () = stop.cancelled() => return,
            };
            if let Err(error) = served {
                tracing::warn!(%peer, %error, "a pull was broken off; the export is held until its lease ends");
            }
        });
    }
    tasks.close();
    tasks.wait().await;
}

type Accepted = (TcpStream, std::net::SocketAddr, tokio::sync::OwnedSemaphorePermit);

async fn accept(listener: &TcpListener, connections: &Arc<Semaphore>) -> io::Result<Accepted> {
    let place = connections.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, peer) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok((stream, peer, place))
}

#[derive(Clone)]
struct Holder {
    engine: EngineHandle,
    block_bytes: u32,
    ids: ExportIds,
    pulls: Arc<Semaphore>,
}

impl Holder {
    async fn serve(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut decoder = FrameDecoder::new(MAX_CONTROL_BYTES);
        let Message::Request(request) = read(&mut stream, &mut decoder).await? else {
            return Err(protocol("the first frame is no pull request"));
        };
        let (_place, id) = match self.admit(&request).await {
            Ok(admitted) => admitted,
            Err(refusal) => {
                tracing::info!(request = request.request, %refusal, "a pull was refused");
                return write(&mut stream, &Message::Refused(refusal)).await;
            }
        };
        write(&mut stream, &Message::Accepted).await?;
        self.send_blocks(&mut stream, id, &request).await?;
        match read(&mut stream, &mut decoder).await? {
            Message::Ack => {
                self.engine.ack_export(id).await.map_err(io::Error::other)?;
                Ok(())
            }
            _ => Err(protocol("the blocks were not acknowledged")),
        }
    }

    async fn admit(&self, request: &PullRequest) -> Result<(tokio::sync::OwnedSemaphorePermit, RequestId), Refusal> {
        if request.epoch != self.ids.epoch() {
            return Err(Refusal::EpochMismatch {
                actual: self.ids.epoch(),
            });
        }
        let place = self.pulls.clone().try_acquire_owned().map_err(|_| Refusal::Busy)?;
        let id = self.ids.decode(&request.request).ok_or(Refusal::UnknownExport)?;
        let export = self
            .engine
            .find_export(id)
            .await
            .ok()
            .flatten()
            .ok_or(Refusal::UnknownExport)?;
        if request.prompt != export.prompt_hash {
            return Err(Refusal::PromptMismatch);
        }
        // A release asks for no block, and need not know how large one is.
        if request.count > 0 && request.block_bytes != self.block_bytes {
            return Err(Refusal::BlockBytesMismatch {
                actual: self.block_bytes,
            });
        }
        let available = u32::try_from(export.blocks.len()).unwrap_or(u32::MAX);
        match request.first_block.checked_add(request.count) {
            Some(end) if end <= available => Ok((place, id)),
            _ => Err(Refusal::BadRange { available }),
        }
    }

    async fn send_blocks(&self, stream: &mut TcpStream, id: RequestId, request: &PullRequest) -> io::Result<()> {
        let end = request.first_block + request.count;
        let mut next = request.first_block;
        while next < end {
            let read = self.engine.read_export(id, next, CHUNK_BYTES).await;
            let payloads = read.map_err(io::Error::other)?;
            let payloads = payloads.ok_or_else(|| protocol("the export's lease ended while it was read"))?;
            // Small blocks go out together: a step model's are a few bytes each.
            let mut frames = BytesMut::new();
            for data in payloads.into_iter().take((end - next) as usize) {
                let block = Message::Block {
                    index: next,
                    data: data.into(),
                };
                frames.extend_from_slice(&block.encode());
                next += 1;
                if frames.len() >= WRITE_BYTES {
                    write_bytes(stream, &frames.split()).await?;
                }
            }
            write_bytes(stream, &frames).await?;
        }
        Ok(())
    }
}

async fn read(stream: &mut TcpStream, decoder: &mut FrameDecoder) -> io::Result<Message> {
    let mut buffer = [0; MAX_CONTROL_BYTES];
    loop {
        if let Some(message) = decoder.poll().map_err(io::Error::other)? {
            return Ok(message);
        }
        let length = timeout(IDLE_TIMEOUT, stream.read(&mut buffer)).await??;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        decoder.push(&buffer[..length]);
    }
}

async fn write(stream: &mut TcpStream, message: &Message) -> io::Result<()> {
    write_bytes(stream, &message.encode()).await
}

async fn write_bytes(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    timeout(IDLE_TIMEOUT, stream.write_all(bytes)).await?
}

fn protocol(problem: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_of_one_life() {
        let ids = ExportIds::new(BootEpoch(0xab));
        let check = |text: &str, expected| assert_eq!(ids.decode(text), expected, "{text}");
        check(&ids.encode("cmpl-a-b", RequestId(7)), Some(RequestId(7)));
        check("cmpl-7-ab", Some(RequestId(7)));
        check("cmpl-7-ac", None);
        check("cmpl-x-ab", None);
        check("7-ab", Some(RequestId(7)));
        check("ab", None);
        check("", None);
    }
}
