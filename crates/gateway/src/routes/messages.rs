//! Anthropic's Messages API: its two paths, and all that goes wrong on them in Anthropic's form.

use super::{Payload, REQUEST_ID, Shared, generate, named, wrong_method};
use crate::error::Rejection;
use crate::proxy::dialect::Dialect;
use crate::proxy::intake::count_message_tokens;
use crate::shell::Shell;
use axum::extract::State;
use axum::middleware::map_response_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use homing_wire::anthropic;
use homing_wire::openai::ApiError;
use http::{HeaderMap, HeaderName, header};
use std::sync::Arc;

/// Where Anthropic's clients look for the request's id.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// The paths.
pub(super) fn routes(shell: &Arc<Shell>) -> Router<Arc<Shell>> {
    Router::new()
        .route("/v1/messages", post(messages).fallback(wrong_method))
        .route("/v1/messages/count_tokens", post(count_tokens).fallback(wrong_method))
        .layer(map_response_with_state(Arc::clone(shell), in_anthropics_form))
}

async fn messages(State(shell): Shared, headers: HeaderMap, Payload(body): Payload) -> Result<Response, Rejection> {
    generate(shell, Dialect::Messages, headers, body).await
}

async fn count_tokens(State(shell): Shared, Payload(body): Payload) -> Result<Response, Rejection> {
    let tokens = count_message_tokens(&shell, body).await?;
    Ok(Json(serde_json::json!({ "input_tokens": tokens })).into_response())
}

/// An error's body in Anthropic's form, and every answer's id where Anthropic's clients look for it.
async fn in_anthropics_form(shell: Shared, response: Response) -> Response {
    let response = named(shell, response).await;
    let id = response.headers().get(REQUEST_ID).cloned();
    let (mut head, mut body) = response.into_parts();
    if let Some(id) = id {
        if let Some(error) = head.extensions.get::<ApiError>() {
            body = anthropic::error_body(error, id.to_str().unwrap_or_default()).into();
            head.headers.remove(header::CONTENT_LENGTH);
        }
        head.headers.insert(ANTHROPIC_REQUEST_ID, id);
    }
    Response::from_parts(head, body)
}
