//! The requests that go to engines: the client's body with what must change changed.
//!
//! All legs of an attempt are made from one [`LegPrompt`], so that whoever holds KV and whoever pulls it cannot differ in
//! their prompt: an engine that is handed the KV of another prompt dies of it, or answers from it.

use super::exactness::CARRIED;
use bytes::Bytes;
use homing_kv::BlockHash;
use homing_model::PromptTokens;
use homing_wire::openai::Body;
use homing_wire::transfer_params::prompt_hash;
use std::sync::Arc;

/// Which of the two generating endpoints a request came in by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

impl Endpoint {
    pub(crate) const fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }
}

/// What the legs of one attempt are made from.
#[derive(Clone, Debug)]
pub(crate) struct LegPrompt {
    endpoint: Endpoint,
    body: Arc<Body>,
    tokens: PromptTokens,
}

/// What an engine must be told to hold a prompt's KV for another.
const EXPORT: Bytes = Bytes::from_static(br#"{"do_remote_decode":true,"do_remote_prefill":false}"#);

/// Fields that speak of the answer: a leg of which no client hears has none to speak of, and some of them are refused next to
/// `max_tokens` 1 or without `stream`.
const OF_THE_ANSWER: [&str; 11] = [
    "max_completion_tokens",
    "min_tokens",
    "stream_options",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "echo",
    "stop",
    "return_token_ids",
    "prompt_logprobs",
];

impl LegPrompt {
    /// The client's request as it came, with its prompt's tokens as the router has them.
    pub(crate) fn original(endpoint: Endpoint, body: Arc<Body>, tokens: PromptTokens) -> Self {
        Self { endpoint, body, tokens }
    }

    /// The rest of an answer that broke off: its prompt is `tokens`, the sent ones at the end.
    pub(crate) fn continued(original: &Body, tokens: &[u32], max_tokens: u32) -> Self {
        let mut body = Body::default();
        for name in CARRIED {
            if let Some(value) = original.get(name) {
                body.set_raw(name, value.clone());
            }
        }
        body.set("prompt", tokens);
        body.set("max_tokens", &max_tokens);
        Self {
            endpoint: Endpoint::Completions,
            body: Arc::new(body),
            tokens: tokens.to_vec().into(),
        }
    }

    /// As much of it as the legs that move its history need: its tokens, and no message.
    pub(crate) fn slim(&self) -> Self {
        let body = Self::continued(&self.body, &[], 1).body;
        Self {
            endpoint: Endpoint::Completions,
            body,
            tokens: self.tokens.clone(),
        }
    }

    /// How many tokens it has.
    pub(crate) fn token_count(&self) -> usize {
        self.tokens.len()
    }

    /// What is sent on.
    pub(crate) fn body(&self) -> &Body {
        &self.body
    }

    /// Its first so many tokens, for the legs that move a history.
    pub(crate) fn history(&self, tokens: u32) -> Self {
        Self::continued(&self.body, &self.tokens.part(0, tokens as usize), 1)
    }

    /// The hash of the whole prompt.
    pub(crate) fn hash(&self) -> BlockHash {
        prompt_hash(&self.tokens.whole())
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// The leg that computes what it lacks of the prompt's KV, and holds it.
    pub(crate) fn held_body(&self) -> Bytes {
        self.silent_body(Some(EXPORT))
    }

    /// The leg that computes what it lacks of the prompt's KV, and keeps it.
    pub(crate) fn computed_body(&self) -> Bytes {
        self.silent_body(None)
    }

    /// The leg that pulls the prompt's KV and answers nobody. `params` are those of the leg that holds it, word for word.
    pub(crate) fn pulled_body(&self, params: Bytes) -> Bytes {
        self.silent_body(Some(params))
    }

    fn silent_body(&self, params: Option<Bytes>) -> Bytes {
        let mut body = Body::clone(&self.body);
        for name in OF_THE_ANSWER {
            body.remove(name);
        }
        body.set("max_tokens", &1);
        body.set("stream", &false);
        match params {
            Some(params) => body.set_raw("kv_transfer_params", params),
            None => drop(body.remove("kv_transfer_params")),
        }
        body.to_bytes()
    }

    /// The request for a stream that says its usage at its end.
    pub(crate) fn streamed(&self) -> Body {
        let mut body = Body::clone(&self.body);
        body.set("stream", &true);
        body.set_raw("stream_options", stream_options(&self.body));
        body
    }

    /// The leg that answers. It is always streamed and always says its tokens and its usage; what the client did not
    /// ask for is cut on the way. `params` are the prefill leg's, word for word; they are used up.
    pub(crate) fn decode_body(&self, params: Option<Bytes>) -> Bytes {
        let mut body = self.streamed();
        body.set("return_token_ids", &true);
        match params {
            Some(params) => body.set_raw("kv_transfer_params", params),
            // A client has no business with another request's KV.
            None => drop(body.remove("kv_transfer_params")),
        }
        body.to_bytes()
    }
}

/// The client's own stream options, and the usage at the end.
fn stream_options(body: &Body) -> Bytes {
    let of_client = body.get("stream_options").and_then(|options| Body::parse(options).ok());
    let mut options = of_client.unwrap_or_default();
    options.set("include_usage", &true);
    options.to_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(endpoint: Endpoint, body: &str) -> LegPrompt {
        LegPrompt::original(
            endpoint,
            Arc::new(Body::parse(&body.to_owned().into()).unwrap()),
            vec![1, 2, 3].into(),
        )
    }

    fn text(bytes: &Bytes) -> &str {
        str::from_utf8(bytes).unwrap()
    }

    #[test]
    fn both_legs_have_the_prompt_word_for_word() {
        let messages = r#""messages":[{"role":"user","content":"h\u00e9  1e2"}]"#;
        let client = format!(
            r#"{{"model":"m",{messages},"max_completion_tokens":9,"n":1,"temperature":0.0,"stream_options":{{"continuous_usage_stats":true}},"kv_transfer_params":{{"steal":1}}}}"#
        );
        let legs = prompt(Endpoint::Chat, &client);
        let prefill = legs.held_body();
        let export = text(&EXPORT).to_owned();
        assert_eq!(
            text(&prefill),
            format!(
                r#"{{"model":"m",{messages},"temperature":0.0,"kv_transfer_params":{export},"max_tokens":1,"stream":false}}"#
            )
        );
        let params = r#"{"remote_block_ids": [[1]],"remote_num_tokens":100}"#;
        let decode = legs.decode_body(Some(params.into()));
        assert!(text(&decode).contains(messages) && text(&decode).contains(r#""max_completion_tokens":9"#));
        assert!(
            text(&decode).contains(&format!(r#""kv_transfer_params":{params}"#)),
            "{decode:?}"
        );
        assert!(text(&decode).contains(r#""stream_options":{"continuous_usage_stats":true,"include_usage":true}"#));
        assert!(!text(&legs.decode_body(None)).contains("steal"));
    }

    #[test]
    fn a_continuation_carries_the_sampling_and_nothing_else() {
        let original = r#"{"model":"m","messages":[1],"temperature":0,"max_tokens":9,"tools":[]}"#;
        let legs = LegPrompt::continued(&Body::parse(&original.into()).unwrap(), &[5, 6], 4);
        assert_eq!(legs.endpoint(), Endpoint::Completions);
        let expected = r#"{"model":"m","temperature":0,"prompt":[5,6],"max_tokens":"#;
        assert!(text(&legs.held_body()).starts_with(&format!("{expected}1")));
        assert!(text(&legs.decode_body(None)).starts_with(&format!("{expected}4")));
        assert_eq!(legs.hash(), prompt_hash(&[5, 6]));
    }

    #[test]
    fn both_legs_that_move_a_history_have_the_same_prompt() {
        let client = r#"{"model":"m","messages":[1],"cache_salt":"s","max_tokens":9,"tools":[]}"#;
        let history = prompt(Endpoint::Chat, client).history(2);
        assert_eq!(
            (history.endpoint(), history.hash()),
            (Endpoint::Completions, prompt_hash(&[1, 2]))
        );
        let start =
            r#"{"model":"m","cache_salt":"s","prompt":[1,2],"max_tokens":1,"stream":false,"kv_transfer_params":"#;
        for (body, params) in [
            (history.held_body(), text(&EXPORT)),
            (history.pulled_body(r#"{"odd": 1.50}"#.into()), r#"{"odd": 1.50}"#),
        ] {
            assert_eq!(text(&body), format!("{start}{params}}}"));
        }
    }
}
