//! Stands before a worker and passes all on but what it was told not to: a network and a machine that are too busy.

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is never answered.
    Stalls,
    /// It is answered with this status.
    Refused(u16),
}

/// A front that runs.
pub struct Front {
    pub address: SocketAddr,
    app: App,
    server: JoinHandle<()>,
}

#[derive(Clone)]
struct App {
    behind: SocketAddr,
    client: Client<HttpConnector, Body>,
    /// The path that is not passed on as long as there are fates, and what it was asked.
    path: &'static str,
    fates: Arc<Mutex<VecDeque<Fate>>>,
    seen: Arc<Mutex<usize>>,
}

impl Front {
    /// A front before this address: the first requests for the path have these fates.
    pub async fn start(behind: SocketAddr, path: &'static str, fates: impl IntoIterator<Item = Fate>) -> Self {
        let app = App {
            behind,
            client: Client::builder(TokioExecutor::new()).build_http(),
            path,
            fates: Arc::new(Mutex::new(fates.into_iter().collect())),
            seen: Arc::default(),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let routes = Router::new().fallback(pass).with_state(app.clone());
        let server = tokio::spawn(async move { drop(axum::serve(listener, routes).await) });
        Self { address, app, server }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Requests for the path.
    pub fn seen(&self) -> usize {
        *self.app.seen.lock().expect("no holder panics")
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn pass(State(app): State<App>, mut request: Request) -> Response {
    if request.uri().path() == app.path {
        *app.seen.lock().expect("no holder panics") += 1;
        let fate = app.fates.lock().expect("no holder panics").pop_front();
        match fate {
            Some(Fate::Stalls) => std::future::pending().await,
            Some(Fate::Refused(status)) => {
                return StatusCode::from_u16(status).expect("a status").into_response();
            }
            None => {}
        }
    }
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let uri: Uri = format!("http://{}{path}", app.behind).parse().expect("a uri");
    *request.uri_mut() = uri;
    match app.client.request(request).await {
        Ok(response) => response.map(Body::new),
        Err(_) => StatusCode::BAD_GATEWAY.into_response(),
    }
}
