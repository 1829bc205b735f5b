//! From a request's body to what the engine takes, or to the error that says what is wrong with it.
//!
//! All that can be refused is refused here, before anything is booked: the engine sees only requests that it can serve.

use super::App;
use super::unsupported::{refuse_unsupported, unsupported};
use crate::engine_thread::PullSource;
use crate::request::{Request, StopRules};
use crate::sampler::Sampling;
use crate::text::StopStrings;
use bytes::Bytes;
use homing_engine::api::Transfer;
use homing_kv::Prompt;
use homing_wire::openai::{ApiError, Body, ChatRequest, CompletionRequest, GenerationParams, PromptInput};
use homing_wire::transfer_params::{TransferParams, prompt_hash};
use serde_json::json;
use std::sync::Arc;

/// Tokens of a completion that does not say how many (OpenAI's default).
const COMPLETION_TOKENS: u32 = 16;
/// Stop tokens in one request; more are refused.
const STOP_TOKENS_MAX: usize = 64;
/// Bytes of all stop strings of one request; more are refused.
const STOP_BYTES_MAX: usize = 4096;

/// The two endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// `/v1/completions`.
    Completion,
    /// `/v1/chat/completions`.
    Chat,
}

/// A request that the engine can serve.
pub(super) struct Prepared {
    pub request: Request,
    /// Where its KV is on offer.
    pub source: Option<PullSource>,
    pub stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub return_token_ids: bool,
}

/// Reads and checks a request.
pub(super) fn prepare(app: &App, dialect: Dialect, bytes: &Bytes) -> Result<Prepared, ApiError> {
    let body = Body::parse(bytes)?;
    let (params, tokens) = match dialect {
        Dialect::Completion => {
            let request = CompletionRequest::from_body(&body)?;
            refuse_unsupported(&body, &["add_special_tokens"])?;
            app.served.check_model(request.params.model.as_deref())?;
            let tokens = completion_tokens(app, request.prompt, request.add_special_tokens)?;
            (request.params, tokens)
        }
        Dialect::Chat => {
            let request = ChatRequest::from_body(&body)?;
            refuse_unsupported(&body, &[])?;
            app.served.check_model(request.params.model.as_deref())?;
            let tokens = app.served.chat_tokens(&body, request.add_generation_prompt)?;
            (request.params, tokens)
        }
    };
    if let Some(alternatives) = params.logprobs {
        return Err(unsupported("logprobs", &json!(alternatives), "it to be absent"));
    }
    let max_output_tokens = output_tokens(app, dialect, &params, tokens.len())?;
    let tokens: Arc<[u32]> = tokens.into();
    let prompt = Prompt::of_tokens(&tokens, app.info.block_size);
    let prompt_hash = prompt_hash(&tokens);
    let transfers = params
        .kv_transfer_params
        .as_ref()
        .map(TransferParams::parse)
        .transpose()?
        .unwrap_or_default();
    let (transfer, source) = Offer {
        app,
        prompt: &prompt,
        prompt_hash,
    }
    .read(transfers)?;
    if transfer == Transfer::Export && params.stream && dialect == Dialect::Chat {
        let message = "`stream` is true, expected false where `kv_transfer_params` asks for an export";
        return Err(ApiError::invalid(message).with_param("stream"));
    }
    Ok(Prepared {
        request: Request {
            tokens,
            prompt,
            prompt_hash,
            max_output_tokens,
            transfer,
            sampling: sampling(app, &params),
            stop: stop_rules(&body, &params)?,
            owner: None,
        },
        source,
        stream: params.stream,
        include_usage: params.include_usage,
        continuous_usage: params.continuous_usage,
        return_token_ids: params.return_token_ids,
    })
}

fn completion_tokens(app: &App, prompt: PromptInput, add_special_tokens: bool) -> Result<Vec<u32>, ApiError> {
    match prompt {
        PromptInput::Text(text) if add_special_tokens => Ok(app.served.words.tokenizer.encode_prompt(&text)),
        PromptInput::Text(text) => Ok(app.served.words.tokenizer.encode(&text)),
        PromptInput::Ids(tokens) => app.served.check_tokens(&tokens, "prompt").map(|()| tokens),
    }
}

fn output_tokens(app: &App, dialect: Dialect, params: &GenerationParams, prompt: usize) -> Result<u32, ApiError> {
    let context = app.info.max_context_tokens;
    let left = u32::try_from(prompt)
        .ok()
        .and_then(|prompt| context.checked_sub(prompt))
        .filter(|left| *left > 0);
    let too_long = |output: u32| ApiError::context_too_long(prompt as u64, u64::from(output), u64::from(context));
    let left = left.ok_or_else(|| too_long(params.max_tokens.unwrap_or(1)))?;
    match (params.max_tokens, dialect) {
        (Some(wanted), _) if wanted > left => Err(too_long(wanted)),
        (Some(wanted), _) => Ok(wanted),
        (None, Dialect::Completion) => Ok(COMPLETION_TOKENS.min(left)),
        (None, Dialect::Chat) => Ok(left),
    }
}

fn sampling(app: &App, params: &GenerationParams) -> Sampling {
    // A request without a seed gets one that no other has: the life of the worker and a counter.
    let fresh = || app.info.epoch.0.rotate_left(32) ^ app.nameless.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    Sampling {
        temperature: params.temperature as f32,
        top_p: params.top_p as f32,
        seed: params.seed.map_or_else(fresh, i64::cast_unsigned),
    }
}

fn stop_rules(body: &Body, params: &GenerationParams) -> Result<StopRules, ApiError> {
    let tokens: Vec<u32> = body.read("stop_token_ids", "a list of token ids")?.unwrap_or_default();
    if tokens.len() > STOP_TOKENS_MAX {
        let message = format!(
            "`stop_token_ids` has `{}` ids, expected at most {STOP_TOKENS_MAX}",
            tokens.len()
        );
        return Err(ApiError::invalid(message).with_param("stop_token_ids"));
    }
    let bytes: usize = params.stop.iter().map(String::len).sum();
    if bytes > STOP_BYTES_MAX {
        let message = format!("`stop` has `{bytes}` bytes, expected at most {STOP_BYTES_MAX}");
        return Err(ApiError::invalid(message).with_param("stop"));
    }
    let include: Option<bool> = body.read("include_stop_str_in_output", "true or false")?;
    Ok(StopRules {
        ignore_end_of_sequence: params.ignore_eos,
        tokens,
        strings: StopStrings {
            strings: params.stop.clone(),
            include: include.unwrap_or(false),
        },
        min_output_tokens: params.min_tokens,
    })
}

/// KV on offer, against the prompt that it must be of.
struct Offer<'a> {
    app: &'a App,
    prompt: &'a Prompt,
    prompt_hash: homing_kv::BlockHash,
}

impl Offer<'_> {
    /// What `kv_transfer_params` ask for, and where the KV is on offer.
    fn read(&self, params: TransferParams) -> Result<(Transfer, Option<PullSource>), ApiError> {
        match (params.do_remote_decode, params.do_remote_prefill) {
            (false, false) => Ok((Transfer::None, None)),
            (true, false) => Ok((Transfer::Export, None)),
            (true, true) => Err(wrong("asks for an export and an import, expected one of them")),
            (false, true) => {
                self.check(&params)?;
                let tokens = self.prompt.tokens;
                Ok((Transfer::Import { tokens }, Some(self.source(params)?)))
            }
        }
    }

    /// The offer is of this very prompt. Anything else must not reach the engine: fewer tokens would leave a hole, other
    /// tokens would answer with another prompt's KV.
    fn check(&self, params: &TransferParams) -> Result<(), ApiError> {
        let tokens = self.prompt.tokens;
        if params.remote_num_tokens != Some(tokens) {
            let offered = params
                .remote_num_tokens
                .map_or("nothing".to_owned(), |offered| offered.to_string());
            return Err(wrong(&format!(
                "has `remote_num_tokens` `{offered}`, expected the prompt's `{tokens}`"
            )));
        }
        let blocks = tokens.div_ceil(self.app.info.block_size) as usize;
        match params.remote_block_ids.as_deref() {
            Some([group]) if group.len() == blocks => {}
            _ => {
                return Err(wrong(&format!(
                    "has wrong `remote_block_ids`, expected one list of `{blocks}` ids"
                )));
            }
        }
        if params.transfer_mode.as_deref().is_some_and(|mode| mode != "pull") {
            return Err(wrong("has another `transfer_mode`, expected `pull`"));
        }
        match params.remote_prompt_hash {
            Some(hash) if hash == self.prompt_hash => Ok(()),
            Some(_) => Err(wrong(
                "is of another prompt: use it once, with the prompt that it was made for",
            )),
            None => Err(wrong(
                "has no `remote_prompt_hash`: the source must be a worker of this kind",
            )),
        }
    }

    fn source(&self, params: TransferParams) -> Result<PullSource, ApiError> {
        let missing = |name: &str| wrong(&format!("has no `{name}`"));
        let request = params.remote_request_id.ok_or_else(|| missing("remote_request_id"))?;
        if request.len() > homing_wire::kv_frames::MAX_REQUEST_ID_BYTES {
            return Err(wrong("has a `remote_request_id` that is too long"));
        }
        Ok(PullSource {
            host: params.remote_host.ok_or_else(|| missing("remote_host"))?,
            port: params.remote_port.ok_or_else(|| missing("remote_port"))?,
            request,
            epoch: params.remote_boot_epoch.ok_or_else(|| missing("remote_boot_epoch"))?,
            prompt: self.prompt_hash,
        })
    }
}

fn wrong(problem: &str) -> ApiError {
    ApiError::invalid(format!("`kv_transfer_params` {problem}"))
        .with_param("kv_transfer_params")
        .with_code("kv_transfer_params_invalid")
}
