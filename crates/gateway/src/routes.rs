//! HTTP of the router: generation, what it serves, how it is, what it knows.
//!
//! Whatever goes wrong here is answered in OpenAI's error form, also a path that does not exist, a method that is not
//! meant and a body that is too long; on the paths of `messages`, in Anthropic's.

mod messages;

use crate::core_task::Question;
use crate::error::Rejection;
use crate::fleet::Member;
use crate::prefix::watch::Note;
use crate::proxy::client::{Client, Head, RouteHeaders};
use crate::proxy::dialect::Dialect;
use crate::proxy::flight::{Flight, supervised};
use crate::proxy::intake::TurnRequest;
use crate::proxy::session::SESSION_HEADER;
use crate::shell::Shell;
use crate::tokenise::pass_tokenize;
use crate::upstream::Answer;
use axum::body::{Body, HttpBody as _};
use axum::extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Path, Request, State};
use axum::middleware::map_response_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use bytes::Bytes;
use homing_router::{SessionView, WorkerStatus};
use homing_units::WorkerId;
use homing_wire::openai::{ApiError, ErrorKind, ModelList};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

type Shared = State<Arc<Shell>>;

/// How long a client may take for a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

const REQUEST_ID: &str = "x-request-id";
const SERVER_SENT_EVENTS: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const METRICS_TEXT: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// All routes.
pub(crate) fn routes(shell: Arc<Shell>, body_bytes: usize) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/responses", post(responses))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/tokenize", post(tokenize))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/admin/sessions", get(sessions))
        .route("/admin/workers", get(workers))
        .route("/admin/decisions", get(decisions))
        .route("/admin/requests", get(requests))
        .route("/admin/explain/{request}", get(explain))
        .merge(messages::routes(&shell))
        .fallback(no_such_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(body_bytes))
        .layer(Extension(BodyLimit(body_bytes)))
        .layer(map_response_with_state(Arc::clone(&shell), named))
        .with_state(shell)
}

/// Every answer has an id, also that of a request which was refused before it was one.
async fn named(State(shell): Shared, mut response: Response) -> Response {
    if !response.headers().contains_key(REQUEST_ID) {
        let name = shell.request_name(shell.next_request());
        let name = HeaderValue::try_from(name).expect("hexadecimal digits and a number are fit for a header");
        response.headers_mut().insert(REQUEST_ID, name);
    }
    response
}

async fn chat(State(shell): Shared, headers: HeaderMap, Payload(body): Payload) -> Result<Response, Rejection> {
    generate(shell, Dialect::Chat, headers, body).await
}

async fn completions(State(shell): Shared, headers: HeaderMap, Payload(body): Payload) -> Result<Response, Rejection> {
    generate(shell, Dialect::Completions, headers, body).await
}

async fn responses(State(shell): Shared, headers: HeaderMap, Payload(body): Payload) -> Result<Response, Rejection> {
    generate(shell, Dialect::Responses, headers, body).await
}

/// A turn. A client that hangs up drops this handler or the body that it returned; the flight sees either.
async fn generate(
    shell: Arc<Shell>,
    dialect: Dialect,
    headers: HeaderMap,
    bytes: Bytes,
) -> Result<Response, Rejection> {
    let request = Arc::new(TurnRequest::read(&shell, dialect, headers, bytes).await?);
    let (client, head) = Client::new(shell.client_stall);
    // The flight takes the request over before the core hears of it: from here on nothing can drop it half-way.
    let (id, tracker) = (request.id, shell.flights.clone());
    tracker.spawn(async move {
        let commands = shell.core.turn(request.turn()).await;
        let flight = Flight::new(Arc::clone(&shell), request, commands, client);
        supervised(shell, id, flight).await;
    });
    head.await
        .map(|head| respond(dialect, head))
        .map_err(|_| Rejection::internal())
}

fn respond(dialect: Dialect, head: Head) -> Response {
    match head {
        Head::Stream(route, pieces) => {
            let mut response = Response::new(Body::from_stream(stream(pieces)));
            let headers = response.headers_mut();
            headers.insert(header::CONTENT_TYPE, SERVER_SENT_EVENTS);
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            with(route, response)
        }
        Head::Whole(route, body) => with(route, ([(header::CONTENT_TYPE, JSON)], body).into_response()),
        // The engine's words in the client's dialect.
        Head::Refused(route, answer) if dialect.is_translated() => {
            let error = ApiError::parse(answer.status.as_u16(), &answer.body);
            with(route, Rejection::from(error).into_response())
        }
        Head::Refused(
            route,
            Answer {
                status,
                content_type,
                body,
            },
        ) => {
            let kind = [(header::CONTENT_TYPE, content_type.unwrap_or(JSON))];
            with(route, (status, kind, body).into_response())
        }
        Head::Rejected(route, rejection) => with(route, rejection.into_response()),
    }
}

fn stream(pieces: mpsc::Receiver<Bytes>) -> impl futures::Stream<Item = Result<Bytes, std::convert::Infallible>> {
    futures::stream::unfold(pieces, async |mut pieces| {
        pieces.recv().await.map(|piece| (Ok(piece), pieces))
    })
}

fn with(route: RouteHeaders, mut response: Response) -> Response {
    let values = [
        (REQUEST_ID, Some(route.request)),
        (SESSION_HEADER, route.session),
        ("x-homing-path", route.path.map(str::to_owned)),
        ("x-homing-worker", route.worker),
        (
            "x-homing-cached-tokens",
            route.cached_tokens.map(|tokens| tokens.to_string()),
        ),
    ];
    for (name, value) in values {
        // A worker's configured name need not be fit for a header; then it is left out.
        if let Some(value) = value.and_then(|value| HeaderValue::try_from(value).ok()) {
            response.headers_mut().insert(HeaderName::from_static(name), value);
        }
    }
    response
}

/// Bytes of a body at most.
#[derive(Clone, Copy)]
struct BodyLimit(usize);

/// A request's whole body.
struct Payload(Bytes);

impl<S: Send + Sync> FromRequest<S> for Payload {
    type Rejection = Rejection;

    async fn from_request(request: Request, state: &S) -> Result<Self, Rejection> {
        let BodyLimit(limit) = *request.extensions().get().ok_or_else(Rejection::internal)?;
        // What says that it is too long need not be waited for.
        let declared = request.body().size_hint().lower();
        if usize::try_from(declared).is_ok_and(|declared| declared <= limit) {
            read_body(request, state, limit).await
        } else {
            Err(ApiError::body_too_large(limit).into())
        }
    }
}

async fn read_body<S: Send + Sync>(request: Request, state: &S, limit: usize) -> Result<Payload, Rejection> {
    let Ok(read) = tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, state)).await else {
        let message = format!("the body did not come within `{BODY_TIMEOUT:?}`");
        return Err(refused(StatusCode::REQUEST_TIMEOUT, "body_timeout", message));
    };
    read.map(Payload).map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::body_too_large(limit).into(),
        status => refused(status, "unreadable_body", rejection.body_text()),
    })
}

/// The rest of a path: the name of something.
struct Name(String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Rejection> {
        let name = Path::<String>::from_request_parts(parts, state).await;
        name.map(|Path(name)| Self(name)).map_err(|rejection| {
            let message = format!("the path is wrong: {}", rejection.body_text());
            ApiError::invalid(message).with_code("invalid_path").into()
        })
    }
}

/// The request is at fault, in a way that has a status of its own.
fn refused(status: StatusCode, code: &str, message: String) -> Rejection {
    let mut error = ApiError::invalid(message).with_code(code);
    error.status = status.as_u16();
    error.into()
}

async fn models(State(shell): Shared) -> Response {
    Json(ModelList {
        object: "list".to_owned(),
        data: shell.fleet.models(),
    })
    .into_response()
}

async fn model(State(shell): Shared, Name(name): Name) -> Result<Response, Rejection> {
    let models = shell.fleet.models();
    match models.iter().find(|model| model.id == name) {
        Some(card) => Ok(Json(card).into_response()),
        None => {
            let served: Vec<&str> = models.iter().map(|model| model.id.as_str()).collect();
            Err(ApiError::unknown_model(&name, &served.join("`, `")).into())
        }
    }
}

async fn tokenize(State(shell): Shared, Payload(body): Payload) -> Result<Response, Rejection> {
    let Answer {
        status,
        content_type,
        body,
    } = pass_tokenize(&shell.fleet, &shell.upstream, body).await?;
    Ok((status, [(header::CONTENT_TYPE, content_type.unwrap_or(JSON))], body).into_response())
}

/// Alive: the core answers.
async fn health(State(shell): Shared) -> Result<Response, Rejection> {
    shell.core.ask(Question::Summary).await.ok_or_else(core_gone)?;
    Ok(Json(serde_json::json!({ "status": "ok" })).into_response())
}

/// Ready: workers that could serve a turn answer their probes.
async fn ready(State(shell): Shared) -> Result<Response, Rejection> {
    let summary = shell.core.ask(Question::Summary).await.ok_or_else(core_gone)?;
    if !summary.can_serve() {
        return Err(Rejection::new(
            ErrorKind::Unavailable,
            "no_worker",
            "no worker that could serve a turn is alive",
        ));
    }
    Ok(Json(serde_json::json!({ "status": "ready" })).into_response())
}

async fn metrics(State(shell): Shared) -> Result<Response, Rejection> {
    let summary = shell.core.ask(Question::Summary).await.ok_or_else(core_gone)?;
    let words = shell.tokeniser.words();
    let held = shell.memories(words.as_deref()).held();
    let page = shell.telemetry.page(&summary, &held);
    Ok(([(header::CONTENT_TYPE, METRICS_TEXT)], page).into_response())
}

#[derive(Serialize)]
struct Listed<T> {
    data: Vec<T>,
}

/// A session as the core sees it, and what the shell knows of who it is of and where its prefix broke.
#[derive(Serialize)]
struct SessionEntry {
    #[serde(flatten)]
    view: SessionView,
    #[serde(flatten)]
    note: Option<Note>,
}

async fn sessions(State(shell): Shared) -> Result<Response, Rejection> {
    let views = shell.core.ask(Question::Sessions).await.ok_or_else(core_gone)?;
    let entry = |view: SessionView| SessionEntry {
        note: shell.prefixes.note(view.id),
        view,
    };
    let data: Vec<SessionEntry> = views.into_iter().map(entry).collect();
    Ok(Json(Listed { data }).into_response())
}

/// A configured worker.
#[derive(Serialize)]
struct Entry<'a> {
    url: String,
    #[serde(flatten)]
    of: Standing<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Standing<'a> {
    /// The core's view of it.
    Joined(&'a WorkerStatus),
    /// It has not been reached yet: the core does not know of it.
    Joining {
        id: WorkerId,
        name: &'a str,
        state: &'static str,
        /// Why it could not join so far: it does not answer, or is refused.
        problem: Option<Arc<String>>,
    },
}

impl<'a> Entry<'a> {
    fn of(member: &'a Member, joined: &'a [WorkerStatus]) -> Self {
        let joining = || Standing::Joining {
            id: member.id,
            name: &member.name,
            state: "joining",
            problem: member.problem(),
        };
        let status = joined.iter().find(|worker| worker.id == member.id);
        Self {
            url: member.uri(""),
            of: status.map_or_else(joining, Standing::Joined),
        }
    }
}

async fn workers(State(shell): Shared) -> Result<Response, Rejection> {
    let summary = shell.core.ask(Question::Summary).await.ok_or_else(core_gone)?;
    let members = shell.fleet.members().iter();
    let data: Vec<Entry<'_>> = members.map(|member| Entry::of(member, &summary.workers)).collect();
    let body = serde_json::json!({
        "data": data,
        "policy": shell.policy,
        "block_size": shell.block_size,
        "queued_requests": summary.queued,
        "in_flight_requests": summary.flights,
        "now": summary.now,
    });
    Ok(Json(body).into_response())
}

async fn decisions(State(shell): Shared) -> Result<Response, Rejection> {
    let data = shell.core.ask(Question::Decisions).await.ok_or_else(core_gone)?;
    Ok(Json(Listed { data }).into_response())
}

/// The last requests, each as [`explain`] has one, the oldest first.
async fn requests(State(shell): Shared) -> Result<Response, Rejection> {
    let data = shell.core.ask(Question::Requests).await.ok_or_else(core_gone)?;
    Ok(Json(Listed { data }).into_response())
}

async fn explain(State(shell): Shared, Name(name): Name) -> Result<Response, Rejection> {
    let unknown = || {
        let message = format!("`{name}` is not known, expected a recent `x-request-id` of this router");
        Rejection::new(ErrorKind::NotFound, "unknown_request", message)
    };
    let request = shell.request_of(&name).ok_or_else(unknown)?;
    let ask = |asker| Question::Explain(request, asker);
    let explanation = shell.core.ask(ask).await.ok_or_else(core_gone)?;
    explanation
        .map(|explanation| Json(explanation).into_response())
        .ok_or_else(unknown)
}

fn core_gone() -> Rejection {
    Rejection::new(ErrorKind::Unavailable, "core_gone", "the router's core does not answer")
}

async fn no_such_path(uri: Uri) -> Rejection {
    ApiError::unknown_path(uri.path()).into()
}

async fn wrong_method(method: Method, uri: Uri) -> Rejection {
    ApiError::method_not_allowed(uri.path(), method.as_str()).into()
}
