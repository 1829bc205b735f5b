//! Everything but generation: health, metrics, models, tokens, and what only this worker says.

use super::{App, Payload, Shared, failure, json};
use crate::metrics;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use homing_engine::api::Snapshot;
use homing_units::BootEpoch;
use homing_wire::openai::{
    ApiError, Body, ErrorKind, ModelCard, ModelList, TokenizeInput, TokenizeRequest, TokenizeResponse,
};
use http::{HeaderValue, StatusCode, header};
use serde::{Deserialize, Serialize};

/// How long a client that is not admitted is told to pause for each request that waits, in milliseconds.
const PAUSE_MS_PER_WAITING: u64 = 20;
/// And at most.
const PAUSE_MS_MAX: u64 = 1000;

/// What `/homing/probe` is asked.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProbeQuery {
    /// Prompt and output of the request in question, in tokens.
    #[serde(default)]
    tokens: u64,
}

/// What `/homing/probe` answers, from the last published snapshot: it costs the scheduler nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// This life of the worker.
    pub epoch: BootEpoch,
    /// Whether such a request would start at once.
    pub admit: bool,
    /// Tokens of the pool that are free or free for the taking.
    pub free_tokens: u64,
    /// How long to wait before asking again; 0 where it is admitted.
    pub recommended_pause_ms: u64,
    /// Those of them that are left once the prompts that were accepted have their places.
    pub spare_tokens: u64,
    /// How long work that can wait or go elsewhere had better stay away; 0 while what was accepted has room.
    pub room_pause_ms: u64,
    /// The load in full.
    pub load: Snapshot,
}

pub(super) async fn health(State(app): State<Shared>) -> Response {
    match app.engine.is_alive() && !app.stopping.is_cancelled() {
        true => StatusCode::OK.into_response(),
        false => failure(&ApiError::new(ErrorKind::Unavailable, "the engine has stopped").with_code("engine_stopped")),
    }
}

pub(super) async fn metrics(State(app): State<Shared>) -> Response {
    let page = metrics::render(&app.engine.status(), &app.identity);
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], page).into_response()
}

pub(super) async fn models(State(app): State<Shared>) -> Response {
    answer(&ModelList {
        object: "list".to_owned(),
        data: vec![card(&app)],
    })
}

/// A model by its name, which may have slashes.
pub(super) async fn model(State(app): State<Shared>, id: Result<Path<String>, PathRejection>) -> Response {
    let Path(id) = match id {
        Ok(id) => id,
        Err(rejection) => {
            let message = format!("the path is wrong: {}", rejection.body_text());
            return failure(&ApiError::invalid(message).with_code("invalid_path"));
        }
    };
    match app.served.check_model(Some(&id)) {
        Ok(()) => answer(&card(&app)),
        Err(error) => failure(&error),
    }
}

fn card(app: &App) -> ModelCard {
    ModelCard::new(&app.served.name, app.created, app.info.max_context_tokens)
}

pub(super) async fn info(State(app): State<Shared>) -> Response {
    answer(&app.info)
}

pub(super) async fn probe(State(app): State<Shared>, query: Result<Query<ProbeQuery>, QueryRejection>) -> Response {
    let Query(query) = match query {
        Ok(query) => query,
        Err(rejection) => {
            return failure(&ApiError::invalid(format!("the query is wrong: {rejection}")).with_code("invalid_query"));
        }
    };
    let load = app.engine.status().load;
    let block_size = app.info.block_size;
    let free_tokens = load.free_tokens(block_size);
    let admit = load.waiting == 0 && query.tokens <= free_tokens;
    let pause = (u64::from(load.waiting) + 1)
        .saturating_mul(PAUSE_MS_PER_WAITING)
        .min(PAUSE_MS_MAX);
    answer(&Probe {
        epoch: app.info.epoch,
        admit,
        free_tokens,
        recommended_pause_ms: if admit { 0 } else { pause },
        spare_tokens: load.spare_tokens(block_size),
        room_pause_ms: u64::try_from(load.room_pause(block_size).as_millis()).unwrap_or(u64::MAX),
        load,
    })
}

pub(super) async fn reset_prefix_cache(State(app): State<Shared>) -> Response {
    match app.engine.clear_cache().await {
        Ok(()) => StatusCode::OK.into_response(),
        Err(stopped) => {
            failure(&ApiError::new(ErrorKind::Unavailable, stopped.to_string()).with_code("engine_stopped"))
        }
    }
}

pub(super) async fn tokenize(State(app): State<Shared>, Payload(payload): Payload) -> Response {
    result(payload.and_then(|bytes| {
        let request = TokenizeRequest::parse(&bytes)?;
        app.served.check_model(request.model.as_deref())?;
        let tokens = match &request.input {
            TokenizeInput::Prompt {
                text,
                add_special_tokens: true,
            } => app.served.words.tokenizer.encode_prompt(text),
            TokenizeInput::Prompt {
                text,
                add_special_tokens: false,
            } => app.served.words.tokenizer.encode(text),
            TokenizeInput::Chat {
                add_generation_prompt, ..
            } => app.served.chat_tokens(&Body::parse(&bytes)?, *add_generation_prompt)?,
        };
        let spelled = || {
            tokens
                .iter()
                .map(|token| app.served.words.tokenizer.spelled(*token))
                .collect()
        };
        body(&TokenizeResponse {
            count: u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            max_model_len: app.info.max_context_tokens,
            token_strs: request.return_token_strs.then(spelled),
            tokens,
        })
    }))
}

pub(super) async fn detokenize(State(app): State<Shared>, Payload(payload): Payload) -> Response {
    #[derive(Serialize)]
    struct Answer {
        prompt: String,
    }
    result(payload.and_then(|bytes| {
        let request = Body::parse(&bytes)?;
        app.served
            .check_model(request.read::<String>("model", "a string")?.as_deref())?;
        const EXPECTED: &str = "a list of token ids";
        let tokens: Vec<u32> = request.read("tokens", EXPECTED)?.ok_or_else(|| {
            ApiError::invalid(format!("`tokens` is missing, expected {EXPECTED}")).with_param("tokens")
        })?;
        app.served.check_tokens(&tokens, "tokens")?;
        body(&Answer {
            prompt: app.served.words.tokenizer.decode(&tokens),
        })
    }))
}

fn result(body: Result<Bytes, ApiError>) -> Response {
    match body {
        Ok(body) => json(body),
        Err(error) => failure(&error),
    }
}

pub(super) fn answer<T: Serialize>(value: &T) -> Response {
    result(body(value))
}

fn body<T: Serialize>(value: &T) -> Result<Bytes, ApiError> {
    match serde_json::to_vec(value) {
        Ok(bytes) => Ok(Bytes::from(bytes)),
        Err(error) => Err(ApiError::new(
            ErrorKind::Internal,
            format!("the answer could not be written: {error}"),
        )),
    }
}
