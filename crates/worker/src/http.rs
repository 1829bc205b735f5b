//! HTTP in vLLM's dialect.
//!
//! Here are the routes and what all answers have in common: errors in OpenAI's form, also for a path that does not exist
//! and a body over the limit, and the request's id, which is the client's where it sends one.

mod admin;
mod answer;
mod generate;
mod prepare;
mod release;
mod unsupported;

pub use admin::Probe;
pub use release::{Released, Renewed};

use crate::config::WorkerInfo;
use crate::engine_thread::EngineHandle;
use crate::metrics::Identity;
use crate::serving::Served;
use crate::transfer::ExportIds;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody as _};
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, FromRequest, Request};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use homing_units::Duration;
use homing_wire::openai::ApiError;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// The header that carries a request's id.
const REQUEST_ID: &str = "x-request-id";
/// A client's request id at most, in bytes.
const REQUEST_ID_BYTES_MAX: usize = 128;
/// When a client that found the queue full may try again, in seconds.
const RETRY_AFTER_SECONDS: &str = "1";

/// What the handlers share.
pub(crate) struct App {
    pub engine: EngineHandle,
    pub served: Served,
    pub info: WorkerInfo,
    pub identity: Identity,
    pub exports: ExportIds,
    /// The host under which other workers reach the transfer port.
    pub transfer_host: String,
    /// What a modelled accelerator's server takes before a request reaches its scheduler.
    pub front_end: Duration,
    /// When the worker started, in seconds since 1970.
    pub created: u64,
    pub max_body_bytes: usize,
    /// Long prompts that are read at once, one a core: more would take as long, each on a thread of its own with its memory.
    pub readers: Arc<Semaphore>,
    /// The worker is shutting down.
    pub stopping: CancellationToken,
    /// Requests that came without an id are counted to give them one.
    pub nameless: AtomicU64,
}

pub(crate) type Shared = Arc<App>;
/// A request's body, or why it could not be read.
struct Payload(Result<Bytes, ApiError>);

impl FromRequest<Shared> for Payload {
    type Rejection = std::convert::Infallible;

    async fn from_request(request: Request, app: &Shared) -> Result<Self, Self::Rejection> {
        let limit = app.max_body_bytes;
        // What says that it is too long need not be waited for.
        let declared = request.body().size_hint().lower();
        if usize::try_from(declared).is_ok_and(|declared| declared <= limit) {
            let read = Bytes::from_request(request, app).await;
            return Ok(Self(read.map_err(|rejection| unread(&rejection, limit))));
        }
        Ok(Self(Err(ApiError::body_too_large(limit))))
    }
}

fn unread(rejection: &BytesRejection, limit: usize) -> ApiError {
    match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::body_too_large(limit),
        _ => ApiError::unreadable_body(rejection),
    }
}

/// All routes.
pub(crate) fn routes(app: Shared) -> Router {
    let limit = DefaultBodyLimit::max(app.max_body_bytes);
    Router::new()
        .route("/v1/completions", post(generate::completions))
        .route("/v1/chat/completions", post(generate::chat_completions))
        .route("/v1/models", get(admin::models))
        .route("/v1/models/{*id}", get(admin::model))
        .route("/tokenize", post(admin::tokenize))
        .route("/detokenize", post(admin::detokenize))
        .route("/health", get(admin::health))
        .route("/metrics", get(admin::metrics))
        .route("/reset_prefix_cache", post(admin::reset_prefix_cache))
        .route("/homing/info", get(admin::info))
        .route("/homing/probe", get(admin::probe))
        .route("/homing/release", post(release::release))
        .route("/homing/renew", post(release::renew))
        .fallback(no_such_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(limit)
        .with_state(app)
}

async fn no_such_path(uri: Uri) -> Response {
    failure(&ApiError::unknown_path(uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> Response {
    failure(&ApiError::method_not_allowed(uri.path(), method.as_str()))
}

/// An error as an answer.
fn failure(error: &ApiError) -> Response {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json(error.to_body());
    *response.status_mut() = status;
    if status == StatusCode::TOO_MANY_REQUESTS {
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_SECONDS));
    }
    response
}

/// A JSON body as an answer.
fn json(body: Bytes) -> Response {
    (
        [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))],
        Body::from(body),
    )
        .into_response()
}

/// The request's id: the client's, else one of ours.
fn request_id(headers: &HeaderMap, app: &App) -> Result<String, ApiError> {
    let Some(value) = headers.get(REQUEST_ID) else {
        return Ok(format!(
            "{:x}-{}",
            app.info.epoch.0,
            app.nameless.fetch_add(1, Ordering::Relaxed)
        ));
    };
    let text = value.to_str().ok().filter(|text| {
        (1..=REQUEST_ID_BYTES_MAX).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
    });
    text.map(str::to_owned).ok_or_else(|| {
        let expected = format!("1 to {REQUEST_ID_BYTES_MAX} visible ASCII characters");
        ApiError::invalid(format!("`{REQUEST_ID}` is wrong, expected {expected}")).with_param(REQUEST_ID)
    })
}

/// The request's id on its answer.
fn named(mut response: Response, id: &str) -> Response {
    if let Ok(value) = HeaderValue::from_str(id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}
