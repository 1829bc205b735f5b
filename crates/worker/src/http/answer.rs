//! Answers, whole and in chunks, in the two dialects.

use super::App;
use super::prepare::Dialect;
use crate::executor::{Ended, Outcome, StopCause, TokenOut};
use bytes::Bytes;
use homing_wire::openai::{
    ApiError, ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatResponse, CompletionChoice, CompletionResponse,
    ErrorKind, Usage,
};
use homing_wire::transfer_params::TransferParams;
use serde_json::Value as Json;
use serde_json::value::RawValue;
use std::sync::Arc;

/// What all of a request's answers have in common.
pub(super) struct Form {
    pub dialect: Dialect,
    /// `cmpl-...` or `chatcmpl-...`.
    pub id: String,
    pub created: u64,
    pub model: String,
    pub return_token_ids: bool,
    pub prompt: Arc<[u32]>,
}

/// A request's output so far.
#[derive(Default)]
pub(super) struct Output {
    pub text: String,
    pub tokens: Vec<u32>,
}

impl Output {
    pub fn push(&mut self, token: TokenOut) {
        self.text.push_str(&token.text);
        self.tokens.push(token.token);
    }
}

/// How an output ended, in OpenAI's words.
struct Finish {
    reason: &'static str,
    stop_reason: Option<Json>,
}

impl Finish {
    fn of(outcome: &Outcome) -> Self {
        let (reason, stop_reason) = match outcome {
            Outcome::Stop(StopCause::EndOfSequence) => ("stop", None),
            Outcome::Stop(StopCause::Token(token)) => ("stop", Some(Json::from(*token))),
            Outcome::Stop(StopCause::Text(text)) => ("stop", Some(Json::from(text.as_str()))),
            Outcome::Length => ("length", None),
            // `fault` turned these into errors before.
            Outcome::Aborted | Outcome::ImportFailed(_) | Outcome::BackendFailed => ("error", None),
        };
        Self { reason, stop_reason }
    }
}

/// The error of an output that did not end well.
pub(super) fn fault(outcome: &Outcome) -> Option<ApiError> {
    let internal = |message: String, code: &str| Some(ApiError::new(ErrorKind::Internal, message).with_code(code));
    match outcome {
        Outcome::Stop(_) | Outcome::Length => None,
        Outcome::Aborted => {
            Some(ApiError::new(ErrorKind::Unavailable, "the worker is shutting down").with_code("aborted"))
        }
        Outcome::ImportFailed(error) => {
            let kind = serde_json::to_value(error)
                .ok()
                .and_then(|kind| kind.as_str().map(str::to_owned));
            let kind = kind.unwrap_or_default();
            internal(
                format!("the kv could not be pulled: `{kind}`; nothing was generated"),
                "kv_transfer_failed",
            )
        }
        Outcome::BackendFailed => internal("the forward pass failed".to_owned(), "engine_failed"),
    }
}

/// The usage; `cached_tokens` are those found here, pulled ones are not among them.
pub(super) fn usage(ended: &Ended) -> Usage {
    let usage = &ended.usage;
    Usage::new(usage.prompt_tokens, usage.local_cached_tokens, usage.output_tokens)
}

impl Form {
    /// The whole answer.
    pub fn whole(&self, app: &App, output: Output, ended: &Ended) -> Bytes {
        let Output { mut text, tokens } = output;
        text.push_str(&ended.text);
        let finish = Finish::of(&ended.outcome);
        let token_ids = self.return_token_ids.then_some(tokens);
        match self.dialect {
            Dialect::Completion => {
                let choice = CompletionChoice {
                    text,
                    finish_reason: Some(finish.reason.to_owned()),
                    stop_reason: finish.stop_reason,
                    token_ids,
                    prompt_token_ids: self.prompt_token_ids(),
                    ..CompletionChoice::default()
                };
                let mut answer = CompletionResponse::new(&self.id, self.created, &self.model, choice);
                answer.usage = Some(usage(ended));
                answer.kv_transfer_params = self.transfer_params(app, ended);
                answer.to_body()
            }
            Dialect::Chat => {
                let mut choice = ChatChoice::text(text, finish.reason);
                choice.stop_reason = finish.stop_reason;
                choice.token_ids = token_ids;
                let mut answer = ChatResponse::new(&self.id, self.created, &self.model, choice, usage(ended));
                answer.prompt_token_ids = self.prompt_token_ids();
                answer.kv_transfer_params = self.transfer_params(app, ended);
                answer.to_body()
            }
        }
    }

    /// A chunk that adds a token; the `first` one opens the answer. `so_far` is the usage where each chunk has it.
    pub fn chunk(&self, token: TokenOut, first: bool, so_far: Option<Usage>) -> Bytes {
        let token_ids = self.return_token_ids.then(|| vec![token.token]);
        // Not copied for each token: a prompt is long.
        let prompt = first.then(|| self.prompt_token_ids()).flatten();
        match self.dialect {
            Dialect::Completion => {
                let choice = CompletionChoice {
                    text: token.text,
                    token_ids,
                    prompt_token_ids: prompt,
                    ..Default::default()
                };
                let mut chunk = CompletionResponse::new(&self.id, self.created, &self.model, choice);
                chunk.usage = so_far;
                chunk.to_body()
            }
            Dialect::Chat => {
                let role = first.then(|| "assistant".to_owned());
                let delta = ChatDelta {
                    role,
                    content: Some(token.text),
                };
                let choice = ChatChunkChoice {
                    delta,
                    token_ids,
                    ..Default::default()
                };
                let mut chunk = ChatChunk::new(&self.id, self.created, &self.model, choice);
                chunk.prompt_token_ids = prompt;
                chunk.usage = so_far;
                chunk.to_body()
            }
        }
    }

    /// The chunk that ends an answer; `total` is the usage where each chunk has it.
    pub fn last(&self, app: &App, ended: &Ended, total: Option<Usage>) -> Bytes {
        let finish = Finish::of(&ended.outcome);
        let finish_reason = Some(finish.reason.to_owned());
        let token_ids = self.return_token_ids.then(Vec::new);
        match self.dialect {
            Dialect::Completion => {
                let choice = CompletionChoice {
                    text: ended.text.clone(),
                    finish_reason,
                    stop_reason: finish.stop_reason,
                    token_ids,
                    ..Default::default()
                };
                let mut chunk = CompletionResponse::new(&self.id, self.created, &self.model, choice);
                chunk.kv_transfer_params = self.transfer_params(app, ended);
                chunk.usage = total;
                chunk.to_body()
            }
            Dialect::Chat => {
                let content = Some(ended.text.clone()).filter(|text| !text.is_empty());
                let delta = ChatDelta { role: None, content };
                let choice = ChatChunkChoice {
                    delta,
                    finish_reason,
                    token_ids,
                    ..Default::default()
                };
                let mut chunk = ChatChunk::new(&self.id, self.created, &self.model, choice);
                chunk.usage = total;
                chunk.to_body()
            }
        }
    }

    /// The usage after `output` tokens. What was cached is said at the end.
    pub fn usage_so_far(&self, output: u32) -> Usage {
        let prompt = u32::try_from(self.prompt.len()).unwrap_or(u32::MAX);
        Usage {
            prompt_tokens: prompt,
            completion_tokens: output,
            total_tokens: prompt.saturating_add(output),
            prompt_tokens_details: None,
        }
    }

    /// The chunk that has only the usage.
    pub fn usage_chunk(&self, usage: Usage) -> Bytes {
        match self.dialect {
            Dialect::Completion => {
                CompletionResponse::usage_only(&self.id, self.created, &self.model, Some(usage)).to_body()
            }
            Dialect::Chat => ChatChunk::usage_only(&self.id, self.created, &self.model, Some(usage)).to_body(),
        }
    }

    fn prompt_token_ids(&self) -> Option<Vec<u32>> {
        self.return_token_ids.then(|| self.prompt.to_vec())
    }

    /// Where the decode leg finds the KV, where it is held for one.
    fn transfer_params(&self, app: &App, ended: &Ended) -> Option<Box<RawValue>> {
        let export = ended.export.as_ref()?;
        let params = TransferParams {
            do_remote_prefill: true,
            do_remote_decode: false,
            remote_block_ids: Some(vec![export.blocks.iter().map(|block| block.0).collect()]),
            remote_engine_id: Some(format!("{}-{:x}", app.info.name, app.info.epoch.0)),
            remote_request_id: Some(app.exports.encode(&self.id, export.id)),
            remote_host: Some(app.transfer_host.clone()),
            remote_port: Some(app.info.endpoints.kv_transfer.port()),
            tp_size: Some(1),
            remote_num_tokens: Some(export.tokens),
            transfer_mode: Some("pull".to_owned()),
            remote_prefill_cached_tokens: Some(ended.usage.local_cached_tokens),
            remote_boot_epoch: Some(app.info.epoch),
            remote_prompt_hash: Some(export.prompt_hash),
            other: Vec::new(),
        };
        let json = String::from_utf8(params.to_json().to_vec()).ok()?;
        RawValue::from_string(json).ok()
    }
}
