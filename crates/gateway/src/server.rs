//! Client connections: accepted, bounded in number, closed in an orderly way.
//!
//! Not `axum::serve`, because that bounds neither the connections nor the time that a shutdown takes: a client that has
//! sent half a request would hold it up, though nothing is lost for it.

use axum::Router;
use bytes::Bytes;
use http::{Request, Response};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// What is read of a connection at once at most, and how long the head of a request may be. A connection keeps a buffer of what it
/// reads at once for as long as it is open: left alone it grows to 400 KiB with the first long prompt.
pub(crate) const READ_BYTES: usize = 64 << 10;
/// How long a client may take for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a client may go on with a request that it has begun to send when the shutdown begins.
const UNSENT_GRACE: Duration = Duration::from_millis(250);
/// The pause after a failed accept: out of file descriptors, more often than not.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How connections come to their ends.
#[derive(Clone)]
pub(crate) struct Ends {
    /// Cancelled when no new request is taken any longer.
    pub(crate) stop: CancellationToken,
    /// Cancelled when the bytes that clients have not taken are not waited for any longer.
    pub(crate) sever: CancellationToken,
}

/// Accepts connections until `ends.stop`; each ends after the request that it is at.
pub(crate) async fn serve(
    listener: TcpListener,
    routes: Router,
    connections_max: usize,
    ends: Ends,
    connections: TaskTracker,
) {
    let places = Arc::new(Semaphore::new(connections_max.clamp(1, Semaphore::MAX_PERMITS)));
    loop {
        let accepted = tokio::select! {
            () = ends.stop.cancelled() => return,
            accepted = accept(&listener, &places) => accepted,
        };
        let (stream, place) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection was not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (routes, ends) = (routes.clone(), ends.clone());
        connections.spawn(async move {
            connection(stream, routes, ends).await;
            drop(place);
        });
    }
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> std::io::Result<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let place = Arc::clone(places)
        .acquire_owned()
        .await
        .map_err(std::io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, place))
}

async fn connection(stream: TcpStream, routes: Router, ends: Ends) {
    // A token must not wait for the next one.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection has no TCP_NODELAY");
    }
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(READ_BYTES);
    let progress = Progress::default();
    let connection = builder.serve_connection(TokioIo::new(stream), followed(routes, progress.clone()));
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => return report(ended),
        () = ends.stop.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        ended = connection.as_mut() => return report(ended),
        () = tokio::time::sleep(UNSENT_GRACE) => {}
    }
    if progress.is_answering() {
        tokio::select! {
            ended = connection => report(ended),
            () = ends.sever.cancelled() => {}
        }
    }
}

fn report(ended: hyper::Result<()>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke");
    }
}

/// Whether a connection has a request under way: one that has come in whole and is not answered yet. HTTP/1 has one at
/// a time.
#[derive(Clone, Default)]
struct Progress(Arc<AtomicBool>);

impl Progress {
    fn set(&self, is_answering: bool) {
        self.0.store(is_answering, Ordering::Relaxed);
    }

    fn is_answering(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The routes, with the progress of their requests.
fn followed(
    routes: Router,
    progress: Progress,
) -> impl hyper::service::Service<
    Request<Incoming>,
    Response = Response<Answering>,
    Error = Infallible,
    Future = impl Future<Output = Result<Response<Answering>, Infallible>>,
> {
    let routes = TowerToHyperService::new(routes);
    service_fn(move |request: Request<Incoming>| {
        let progress = progress.clone();
        progress.set(request.body().is_end_stream());
        let receiving = |body| Receiving {
            body,
            progress: progress.clone(),
        };
        let answer = hyper::service::Service::call(&routes, request.map(receiving));
        async move { Ok(answer.await?.map(|body| Answering { body, progress })) }
    })
}

/// A request's body, whose end is the begin of the work on it.
struct Receiving {
    body: Incoming,
    progress: Progress,
}

impl Body for Receiving {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if matches!(frame, Poll::Ready(None)) || self.body.is_end_stream() {
            self.progress.set(true);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer's body: when it is dropped, the request is no longer under way.
struct Answering {
    body: axum::body::Body,
    progress: Progress,
}

impl Body for Answering {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.progress.set(false);
    }
}
