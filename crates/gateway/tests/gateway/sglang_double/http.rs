//! The double's HTTP server: what is asked becomes a job, and its steps become the answer.
//!
//! As there, a stream's head is sent with its first event: a request that fails before its first token is answered by its
//! status without a stream, and by 200 with an error event in one (`_handle_streaming_request`: the generator's first item is
//! awaited, but an abort is an item).

use super::jobs::{self, Act, Finish, Step, Steps};
use super::shapes::{self, Api, Form};
use super::{Seen, Server};
use ::http::{HeaderMap, StatusCode, header};
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use homing_model::ChatInput;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

type App = State<Arc<Server>>;

/// Serves one life; its connections end with it.
pub async fn serve(listener: TcpListener, server: Arc<Server>) {
    let life = server.life.clone();
    let mut routes = Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/generate", post(generate).put(generate))
        .route("/abort_request", post(abort_request))
        .route("/close_session", get(close_session).post(close_session))
        .route("/flush_cache", get(flush_cache).post(flush_cache))
        .route("/tokenize", post(tokenize))
        .route("/v1/tokenize", post(tokenize))
        .route("/v1/models", get(models))
        .route("/model_info", get(model_info))
        .route("/get_model_info", get(model_info))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/health", get(health))
        .route("/health_generate", get(health));
    if server.spec.metrics {
        routes = routes.route("/metrics", get(metrics));
    }
    let routes = routes.with_state(server);
    let mut connections = tokio::task::JoinSet::new();
    while let Some(accepted) = life.run_until_cancelled(listener.accept()).await {
        let Ok((stream, _)) = accepted else { continue };
        stream.set_nodelay(true).expect("a live socket");
        let service = TowerToHyperService::new(routes.clone());
        connections.spawn(async move {
            let connection = hyper::server::conn::http1::Builder::new();
            drop(connection.serve_connection(TokioIo::new(stream), service).await);
        });
        while connections.try_join_next().is_some() {}
    }
    connections.shutdown().await;
}

async fn health(State(server): App) -> StatusCode {
    tokio::time::sleep(server.spec.waits.health).await;
    match server.log.sick.load(Ordering::SeqCst) {
        true => StatusCode::SERVICE_UNAVAILABLE,
        false => StatusCode::OK,
    }
}

async fn models(State(server): App) -> Json<Value> {
    let model = &server.spec.model;
    Json(
        json!({"object": "list", "data": [{"id": model, "object": "model", "created": 1_790_000_000, "owned_by": "sglang",
        "root": model, "parent": null, "max_model_len": server.spec.context_len}]}),
    )
}

async fn model_info(State(server): App) -> Json<Value> {
    Json(
        json!({"model_path": server.spec.model, "served_model_name": server.spec.model, "tokenizer_path": server.spec.model,
        "is_generation": true, "preferred_sampling_params": null, "weight_version": "default",
        "disaggregation_mode": server.spec.mode.name(), "has_image_understanding": false, "model_type": "llama"}),
    )
}

async fn server_info(State(server): App) -> Json<Value> {
    server.log.described.fetch_add(1, Ordering::SeqCst);
    server.log.changed.notify_waiters();
    Json(shapes::server_info(&server))
}

async fn metrics(State(server): App) -> String {
    shapes::metrics(&server)
}

async fn tokenize(State(server): App, headers: HeaderMap, body: Bytes) -> Response {
    match json_of(&headers, &body).and_then(|body| prompt_of(&server, &body)) {
        Ok(tokens) => Json(json!({"count": tokens.len(), "max_model_len": server.spec.context_len, "tokens": tokens}))
            .into_response(),
        Err(message) => refusal(Api::Chat, &message, "BadRequest", 400),
    }
}

async fn close_session() -> StatusCode {
    StatusCode::OK
}

async fn flush_cache(State(server): App) -> StatusCode {
    for rank in 0..server.spec.dp_size {
        let changes = server.caches[rank as usize].lock().unwrap().clear();
        server.announce(rank, &changes);
    }
    StatusCode::OK
}

/// Ends the requests whose ids begin with the given one: the tokenizer asks for exactly one, the scheduler compares
/// beginnings. An id that is not under way is passed over.
async fn abort_request(State(server): App, Json(body): Json<Value>) -> StatusCode {
    let rid = body["rid"].as_str().unwrap_or_default();
    let all = body["abort_all"] == true;
    let running = server.running.lock().unwrap();
    if all || running.contains_key(rid) {
        for job in running.values().filter(|job| all || job.rid.starts_with(rid)) {
            server.log.aborted.fetch_add(1, Ordering::SeqCst);
            if job.rid != rid && !all {
                server
                    .log
                    .faults
                    .lock()
                    .unwrap()
                    .push(format!("abort of `{rid}` ended `{}` too", job.rid));
            }
            job.abort.cancel();
        }
    }
    StatusCode::OK
}

async fn chat(state: App, headers: HeaderMap, body: Bytes) -> Response {
    ask(state, Api::Chat, headers, body).await
}

async fn completions(state: App, headers: HeaderMap, body: Bytes) -> Response {
    ask(state, Api::Completions, headers, body).await
}

async fn generate(state: App, headers: HeaderMap, body: Bytes) -> Response {
    ask(state, Api::Generate, headers, body).await
}

async fn ask(State(server): App, api: Api, headers: HeaderMap, body: Bytes) -> Response {
    let mut body = match json_of(&headers, &body) {
        Ok(body) => body,
        Err(message) => return refusal(api, &message, "Bad Request", 400),
    };
    if api == Api::Chat && body["stream"] == true {
        // A chat's stream has no place for tokens; the words are SGLang's.
        for name in ["return_prompt_token_ids", "return_token_ids", "return_meta_info"] {
            if body[name] == true {
                let message =
                    format!("{name} is not supported with streaming. Please set stream=false when using {name}=true.");
                return refusal(api, &message, "BadRequest", 400);
            }
        }
    }
    for (header, name) in [
        ("x-sglext-return-input-ids", "return_input_ids_in_sglext"),
        ("x-sglext-return-output-ids", "return_output_ids_in_sglext"),
    ] {
        if headers.get(header).is_some_and(|value| value == "1") {
            body[name] = json!(true);
        }
    }
    let job = match jobs::read(&server, &body, &headers) {
        Ok(job) => job,
        Err(message) => return refusal(api, &message, "BadRequest", 400),
    };
    let path = match api {
        Api::Chat => "/v1/chat/completions",
        Api::Completions => "/v1/completions",
        Api::Generate => "/generate",
    };
    server.log.seen.lock().unwrap().push(Seen {
        path: path.to_owned(),
        body: body.clone(),
        headers,
        rank: job.rank,
    });
    server.log.changed.notify_waiters();
    if let Some(Act::Refuse(status)) = job.act {
        return refusal(api, "scripted", "InternalServerError", status);
    }
    let (rid, prompt, limit) = (job.rid.clone(), job.prompt.clone(), job.limit);
    let steps = jobs::start(&server, job);
    let answer = Answer {
        api,
        body,
        rid,
        prompt,
        limit,
        cache_report: server.spec.cache_report,
    };
    match answer.body["stream"] == true {
        true => answer.stream(steps).await,
        false => answer.whole(steps).await,
    }
}

/// An answer under way.
struct Answer {
    api: Api,
    body: Value,
    rid: String,
    prompt: Vec<u32>,
    limit: usize,
    cache_report: bool,
}

impl Answer {
    fn form(&self) -> Form<'_> {
        Form {
            api: self.api,
            body: &self.body,
            rid: &self.rid,
            prompt: &self.prompt,
            cache_report: self.cache_report,
        }
    }

    async fn whole(self, mut steps: Steps) -> Response {
        let mut output = Vec::new();
        while let Some(step) = steps.recv().await {
            match step {
                Step::Token { token, .. } => output.push(token),
                Step::Cut => return cut(),
                Step::Finish(finish) => return self.end(&output, &finish),
            }
        }
        // The server's life is over.
        cut()
    }

    fn end(&self, output: &[u32], finish: &Finish) -> Response {
        match finish.status {
            Some(400) => refusal(self.api, &finish.message, "BadRequestError", 400),
            Some(status) => refusal(self.api, &finish.message, &status.to_string(), status),
            None => Json(self.form().whole(output, finish)).into_response(),
        }
    }

    async fn stream(self, mut steps: Steps) -> Response {
        let Some(first) = steps.recv().await else { return cut() };
        let (sender, receiver) = mpsc::channel::<Result<String, std::io::Error>>(1);
        tokio::spawn(async move { self.produce(first, steps, &sender).await });
        let stream = futures::stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)));
        (
            [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")],
            Body::from_stream(stream),
        )
            .into_response()
    }

    /// Sends the events of the steps. The finish of completions comes with the last token's event, so each token waits
    /// for the step after it only where it may be the last.
    async fn produce(&self, first: Step, mut steps: Steps, sender: &mpsc::Sender<Result<String, std::io::Error>>) {
        let form = self.form();
        let mut output = Vec::new();
        let mut next = Some(first);
        let mut has_opened = false;
        while let Some(step) = next.take() {
            let events = match step {
                Step::Token { token, cached } => {
                    let mut events = if std::mem::replace(&mut has_opened, true) {
                        Vec::new()
                    } else {
                        form.opening()
                    };
                    output.push(token);
                    if self.api != Api::Chat && output.len() >= self.limit {
                        next = steps.recv().await;
                    }
                    let last = match &next {
                        Some(Step::Finish(finish)) if finish.status.is_none() => Some(finish),
                        _ => None,
                    };
                    events.push(form.token(&output, cached, last));
                    events
                }
                Step::Finish(finish) => {
                    let mut events = form.ending(&output, &finish);
                    events.push("data: [DONE]\n\n".to_owned());
                    for event in events {
                        drop(sender.send(Ok(event)).await);
                    }
                    return;
                }
                Step::Cut => break,
            };
            for event in events {
                if sender.send(Ok(event)).await.is_err() {
                    return;
                }
            }
            if next.is_none() {
                next = tokio::select! {
                    step = steps.recv() => step,
                    () = sender.closed() => return,
                };
            }
        }
        // The steps ended without a finish: it was told to break off, or its life is over.
        drop(sender.send(Err(std::io::Error::other("cut"))).await);
    }
}

/// A request's body, which must say that it is JSON (`validate_json_request`).
fn json_of(headers: &HeaderMap, body: &[u8]) -> Result<Value, String> {
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok())
        .unwrap_or_default();
    if kind.split(';').next() != Some("application/json") {
        return Err("Unsupported Media Type: Only 'application/json' is allowed".to_owned());
    }
    serde_json::from_slice(body).map_err(|error| error.to_string())
}

/// The connection breaks before there is an answer.
fn cut() -> Response {
    let broken = futures::stream::once(async { Err::<Bytes, _>(std::io::Error::other("cut")) });
    ([(header::CONTENT_LENGTH, "1")], Body::from_stream(broken)).into_response()
}

fn refusal(api: Api, message: &str, kind: &str, status: u16) -> Response {
    let body = match api {
        Api::Generate => json!({"error": {"message": message}}),
        _ => shapes::error(message, kind, status),
    };
    (StatusCode::from_u16(status).expect("a status"), Json(body)).into_response()
}

/// A request's prompt in tokens.
pub fn prompt_of(server: &Server, body: &Value) -> Result<Vec<u32>, String> {
    let encode = |text: &str| server.vocabulary.tokenizer.encode(text);
    let ids = |ids: &[Value]| -> Result<Vec<u32>, String> {
        let id = |id: &Value| {
            id.as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .ok_or("a token is no id")
        };
        Ok(ids.iter().map(id).collect::<Result<_, _>>()?)
    };
    let prompt = match (&body["input_ids"], &body["prompt"], &body["text"], &body["messages"]) {
        (Value::Array(tokens), ..) | (_, Value::Array(tokens), ..) => ids(tokens)?,
        (_, Value::String(text), ..) | (_, _, Value::String(text), _) => encode(text),
        (_, _, _, messages @ Value::Array(_)) => {
            let input = ChatInput {
                messages,
                tools: body.get("tools"),
                add_generation_prompt: true,
                unix_seconds: 0,
            };
            server
                .vocabulary
                .encode_chat(&input)
                .map_err(|error| error.to_string())?
        }
        _ => return Err("there is no prompt".to_owned()),
    };
    if prompt.is_empty() {
        return Err("Prompt cannot be empty".to_owned());
    }
    Ok(prompt)
}
