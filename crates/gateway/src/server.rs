//! Client connections: accepted, bounded in number, closed in an orderly way.
//!
//! Not `axum::serve`, because that bounds neither the connections nor the time that a shutdown takes.

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How long a client may take for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause after a failed accept: out of file descriptors, more often than not.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections until `stop`; each ends after the request that it is at.
pub(crate) async fn serve(
    listener: TcpListener,
    routes: Router,
    connections_max: usize,
    stop: CancellationToken,
    connections: TaskTracker,
) {
    let places = Arc::new(Semaphore::new(connections_max.clamp(1, Semaphore::MAX_PERMITS)));
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
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
        let (routes, stop) = (routes.clone(), stop.clone());
        connections.spawn(async move {
            connection(stream, routes, stop).await;
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

async fn connection(stream: TcpStream, routes: Router, stop: CancellationToken) {
    // A token must not wait for the next one.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection has no TCP_NODELAY");
    }
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let mut connection = std::pin::pin!(connection);
    let mut stopping = false;
    loop {
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a connection broke");
                }
                return;
            }
            () = stop.cancelled(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}
