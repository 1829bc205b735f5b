//! What an answer has been so far: which tokens the client has, under which id, and whether it could go on elsewhere.
//!
//! Engines' chunks go through here one by one. Those of the engine that began the answer pass word for word, less what
//! only the router asked for; those of an engine that continues it are put into the form of the first one's.

use super::exactness::Blocker;
use super::legs::Endpoint;
use bytes::Bytes;
use homing_wire::openai::{AnswerEdit, AnswerView, Usage, edit_answer};
use serde_json::{Value, json};

/// The client's view of an answer, chunk by chunk.
#[derive(Debug)]
pub(crate) struct Transcript {
    endpoint: Endpoint,
    edit: AnswerEdit,
    blocker: Option<Blocker>,
    /// Id and time of the first chunk: the client knows the answer by them.
    identity: Option<(String, u64)>,
    /// The request's model, for chunks made here.
    model: String,
    /// The prompt as the engine that began the answer says it had it.
    prompt: Option<Vec<u32>>,
    /// Tokens whose text the client has.
    sent: Vec<u32>,
    /// That text.
    text: String,
    /// Tokens since then, whose text an engine holds back (part of a character, say). A continuation makes them anew.
    textless: Vec<u32>,
    /// Tokens that earlier legs had sent; 0 for the leg that began the answer.
    before: u32,
    /// Prompt tokens that the engine which began the answer found in its cache, where it said so in time.
    cached: Option<u32>,
    leg: LegState,
}

/// What the present leg has said.
#[derive(Debug, Default)]
struct LegState {
    tokens: u32,
    usage: Option<Usage>,
    has_output: bool,
    has_ended: bool,
}

/// What one chunk means.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Piece {
    /// The JSON text for the client, if there is anything for it.
    pub(crate) for_client: Option<Bytes>,
    /// The first sign of a token from this leg.
    pub(crate) is_first_output: bool,
}

/// An engine's stream that says it failed, or is not understood.
#[derive(Debug, PartialEq)]
pub(crate) struct Fault {
    /// The engine's own code of the error, where it gives one.
    pub(crate) code: Option<String>,
    pub(crate) detail: String,
}

impl Transcript {
    /// `blocker` says why the request itself cannot be continued, if so.
    pub(crate) fn new(endpoint: Endpoint, edit: AnswerEdit, model: &str, blocker: Option<Blocker>) -> Self {
        Self {
            endpoint,
            edit,
            blocker,
            identity: None,
            model: model.to_owned(),
            prompt: None,
            sent: Vec::new(),
            text: String::new(),
            textless: Vec::new(),
            before: 0,
            cached: None,
            leg: LegState::default(),
        }
    }

    /// A leg begins. Where the client has nothing yet it begins the answer anew, else it continues it.
    pub(crate) fn begin_leg(&mut self, continues: bool) {
        let leg = std::mem::take(&mut self.leg);
        let said = leg.usage.as_ref().and_then(Usage::cached_tokens);
        self.cached = self.cached.or(said).filter(|_| continues);
        self.textless.clear();
        if !continues {
            self.prompt = None;
            self.sent.clear();
            self.text.clear();
            self.identity = None;
        }
        self.before = count(&self.sent);
    }

    /// Takes the data of an event.
    ///
    /// # Errors
    /// The event is an error, or no chunk.
    pub(crate) fn take(&mut self, data: &Bytes, continues: bool) -> Result<Piece, Fault> {
        let fault = |code: Option<String>, detail: String| Err(Fault { code, detail });
        let Some(mut view) = AnswerView::parse(data) else {
            let start = String::from_utf8_lossy(&data[..data.len().min(80)]);
            return fault(None, format!("expected a chunk, found `{start}`"));
        };
        if let Some(error) = view.error {
            return fault(error.code, error.message);
        }
        if matches!(view.finish_reason.as_deref(), Some("error" | "abort")) {
            return fault(None, "the engine ended the request".to_owned());
        }
        if !continues {
            self.prompt = view.prompt_token_ids.take().or(self.prompt.take());
        }
        self.note(&view);
        let is_first_output = view.has_output() && !self.leg.has_output;
        self.leg.has_output |= view.has_output();
        let for_client = if continues {
            self.translated(&view)
        } else {
            edit_answer(data, self.edit)
        };
        Ok(Piece {
            for_client,
            is_first_output,
        })
    }

    fn note(&mut self, view: &AnswerView) {
        if self.identity.is_none() {
            self.identity = view.id.clone().map(|id| (id, view.created.unwrap_or_default()));
        }
        self.leg.usage = view.usage.or(self.leg.usage.take());
        self.leg.has_ended |= view.finish_reason.is_some();
        if view.structured {
            self.blocker = self.blocker.or(Some("the engine parses the model's text"));
        }
        match &view.token_ids {
            Some(tokens) => {
                self.leg.tokens += count(tokens);
                self.textless.extend_from_slice(tokens);
            }
            None if view.text.is_empty() => {}
            None => self.blocker = self.blocker.or(Some("the engine does not say its tokens")),
        }
        if !view.text.is_empty() {
            self.sent.append(&mut self.textless);
            self.text.push_str(&view.text);
        }
    }

    /// Why the answer cannot go on elsewhere from where the client has it now.
    pub(crate) fn blocker(&self) -> Option<Blocker> {
        // While the client sees tokens whose text it lacks: making them anew would show them twice. Once their text has
        // come they are like all others.
        let follows = !self.edit.drop_token_ids && !self.textless.is_empty();
        let following = follows.then_some("the client follows token ids");
        let unnamed = self.identity.is_none().then_some("the answer has no id");
        self.blocker.or(following).or(unnamed)
    }

    /// The prompt's tokens as the engine that began the answer had them, where it says so.
    pub(crate) fn prompt(&self) -> Option<&[u32]> {
        self.prompt.as_deref()
    }

    /// Tokens whose text the client has.
    pub(crate) fn sent(&self) -> &[u32] {
        &self.sent
    }

    /// The text that the client has.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Tokens that earlier legs had sent.
    pub(crate) fn before(&self) -> u32 {
        self.before
    }

    /// Whether this leg's answer is whole, though its stream may lack the end.
    pub(crate) fn leg_has_ended(&self) -> bool {
        self.leg.has_ended
    }

    /// Whether this leg has shown a token.
    pub(crate) fn leg_has_output(&self) -> bool {
        self.leg.has_output
    }

    /// Prompt tokens that the engine found in its cache, and tokens that this leg generated.
    pub(crate) fn leg_usage(&self) -> (Option<u32>, u32) {
        let usage = self.leg.usage.as_ref();
        let reported = usage.map_or(0, |usage| usage.completion_tokens);
        (usage.and_then(Usage::cached_tokens), reported.max(self.leg.tokens))
    }

    /// The chunks that end an answer whose last token was sent, when the engine was lost before it said so.
    pub(crate) fn closing_chunks(&self, prompt_tokens: u32) -> Vec<Bytes> {
        let usage = self.usage_of(prompt_tokens, count(&self.sent));
        let end = self.chunk(json!([self.choice("", Some("length"))]), None);
        let usage = (!self.edit.drop_usage).then(|| self.chunk(json!([]), Some(usage)));
        [Some(end), usage].into_iter().flatten().collect()
    }

    /// A continuing leg's chunk in the form of the answer that it continues.
    fn translated(&self, view: &AnswerView) -> Option<Bytes> {
        if view.no_choices {
            let usage = view.usage.as_ref().filter(|_| !self.edit.drop_usage)?;
            return Some(self.chunk(json!([]), Some(self.whole_usage(usage))));
        }
        // A token whose text is held back is shown to those who follow token ids.
        let tokens = view.token_ids.as_ref().filter(|_| !self.edit.drop_token_ids);
        let shows_tokens = tokens.is_some_and(|tokens| !tokens.is_empty());
        if view.text.is_empty() && view.finish_reason.is_none() && !shows_tokens {
            return None;
        }
        let mut choice = self.choice(&view.text, view.finish_reason.as_deref());
        if let Some(tokens) = view.token_ids.as_ref().filter(|_| !self.edit.drop_token_ids) {
            choice["token_ids"] = json!(tokens);
        }
        Some(self.chunk(json!([choice]), None))
    }

    /// The continuing leg counts the tokens sent before it as its prompt.
    fn whole_usage(&self, usage: &Usage) -> Value {
        let prompt = usage.prompt_tokens.saturating_sub(self.before);
        self.usage_of(prompt, usage.completion_tokens + self.before)
    }

    /// The usage of the whole answer. Cached tokens are those of the engine that began it; where it was lost before it
    /// said them, those that the present one found, of which the tokens sent before are no part.
    fn usage_of(&self, prompt: u32, completion: u32) -> Value {
        let mut whole =
            json!({ "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion });
        if let Some(cached) = self.cached.or(self.leg_usage().0) {
            whole["prompt_tokens_details"] = json!({ "cached_tokens": cached.min(prompt) });
        }
        whole
    }

    fn choice(&self, text: &str, finish_reason: Option<&str>) -> Value {
        match self.endpoint {
            Endpoint::Chat => {
                let delta = if text.is_empty() {
                    json!({})
                } else {
                    json!({ "content": text })
                };
                json!({ "index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason })
            }
            Endpoint::Completions => {
                json!({ "index": 0, "text": text, "logprobs": null, "finish_reason": finish_reason })
            }
        }
    }

    fn chunk(&self, choices: Value, usage: Option<Value>) -> Bytes {
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completions => "text_completion",
        };
        let (id, created) = self.identity.clone().unwrap_or_default();
        let mut chunk =
            json!({ "id": id, "object": object, "created": created, "model": self.model, "choices": choices });
        if let Some(usage) = usage {
            chunk["usage"] = usage;
        }
        chunk.to_string().into()
    }
}

fn count(tokens: &[u32]) -> u32 {
    u32::try_from(tokens.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIDDEN: AnswerEdit = AnswerEdit {
        drop_token_ids: true,
        drop_usage: true,
        drop_transfer_params: true,
    };

    fn transcript(endpoint: Endpoint, edit: AnswerEdit) -> Transcript {
        let mut transcript = Transcript::new(endpoint, edit, "m", None);
        transcript.begin_leg(false);
        transcript
    }

    fn take(transcript: &mut Transcript, data: &str, continues: bool) -> Option<String> {
        let piece = transcript
            .take(&Bytes::copy_from_slice(data.as_bytes()), continues)
            .unwrap();
        piece.for_client.map(|bytes| String::from_utf8(bytes.to_vec()).unwrap())
    }

    #[test]
    fn a_continuation_looks_like_the_answer_it_continues() {
        let mut chat = transcript(
            Endpoint::Chat,
            AnswerEdit {
                drop_usage: false,
                ..HIDDEN
            },
        );
        let first = r#"{"id":"chatcmpl-1","created":7,"model":"m","choices":[{"index":0,"delta":{"content":"ab"},"token_ids":[1,2]}]}"#;
        assert!(!take(&mut chat, first, false).unwrap().contains("token_ids"));
        take(
            &mut chat,
            r#"{"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":""},"token_ids":[3]}]}"#,
            false,
        );
        assert_eq!(
            chat.sent(),
            [1, 2],
            "the text of 3 was held back: it is to be made anew"
        );
        chat.begin_leg(true);
        let next = r#"{"id":"cmpl-9","created":8,"model":"m","choices":[{"index":0,"text":"c","token_ids":[3]}]}"#;
        let next: Value = serde_json::from_str(&take(&mut chat, next, true).unwrap()).unwrap();
        assert_eq!((&next["id"], &next["created"]), (&json!("chatcmpl-1"), &json!(7)));
        assert_eq!(next["object"], "chat.completion.chunk");
        assert_eq!(next["choices"][0]["delta"]["content"], "c");
        let usage =
            r#"{"id":"cmpl-9","choices":[],"usage":{"prompt_tokens":12,"completion_tokens":4,"total_tokens":16}}"#;
        let usage: Value = serde_json::from_str(&take(&mut chat, usage, true).unwrap()).unwrap();
        assert_eq!(
            usage["usage"],
            json!({"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16})
        );
        assert_eq!(chat.leg_usage(), (None, 4));
        assert_eq!(chat.blocker(), None);
    }

    #[test]
    fn what_cannot_go_on_elsewhere_is_noticed() {
        let check = |data: &str, edit: AnswerEdit, blocked: bool| {
            let mut chat = transcript(Endpoint::Chat, edit);
            take(&mut chat, data, false);
            assert_eq!(chat.blocker().is_some(), blocked, "{data}: {:?}", chat.blocker());
        };
        check(
            r#"{"id":"c","choices":[{"delta":{"content":"a"},"token_ids":[1]}]}"#,
            HIDDEN,
            false,
        );
        check(
            r#"{"id":"c","choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            HIDDEN,
            false,
        );
        check(
            r#"{"choices":[{"delta":{"content":"a"},"token_ids":[1]}]}"#,
            HIDDEN,
            true,
        );
        check(r#"{"id":"c","choices":[{"delta":{"content":"a"}}]}"#, HIDDEN, true);
        check(
            r#"{"id":"c","choices":[{"delta":{"tool_calls":[{"index":0}]},"token_ids":[1]}]}"#,
            HIDDEN,
            true,
        );
        check(
            r#"{"id":"c","choices":[{"delta":{"reasoning":"a"},"token_ids":[1]}]}"#,
            HIDDEN,
            true,
        );
        let shown = AnswerEdit {
            drop_token_ids: false,
            ..HIDDEN
        };
        check(
            r#"{"id":"c","choices":[{"delta":{"content":""},"token_ids":[1]}]}"#,
            shown,
            true,
        );
    }

    #[test]
    fn a_client_that_follows_token_ids_is_cut_only_inside_a_character() {
        let shown = AnswerEdit {
            drop_token_ids: false,
            ..HIDDEN
        };
        let mut chat = transcript(Endpoint::Chat, shown);
        for (text, token, blocked) in [("a", 1, false), ("", 2, true), ("\u{e9}", 3, false), ("", 4, true)] {
            let chunk = json!({"id": "c", "choices": [{"delta": {"content": text}, "token_ids": [token]}]});
            take(&mut chat, &chunk.to_string(), false);
            assert_eq!(chat.blocker().is_some(), blocked, "{text}: {:?}", chat.blocker());
        }
        assert_eq!(chat.sent(), [1, 2, 3]);
    }

    #[test]
    fn a_continuation_shows_tokens_whose_text_is_held_back_to_those_who_follow_them() {
        let check = |edit: AnswerEdit, shown: bool| {
            let mut answer = transcript(Endpoint::Completions, edit);
            let first = r#"{"id":"c","choices":[{"index":0,"text":"a","token_ids":[1]}]}"#;
            take(&mut answer, first, false);
            answer.begin_leg(true);
            let held_back = r#"{"id":"d","choices":[{"index":0,"text":"","token_ids":[2]}]}"#;
            let found = take(&mut answer, held_back, true);
            assert_eq!(found.is_some_and(|chunk| chunk.contains(r#""token_ids":[2]"#)), shown);
        };
        let follows = AnswerEdit {
            drop_token_ids: false,
            ..HIDDEN
        };
        check(follows, true);
        check(HIDDEN, false);
    }

    #[test]
    fn what_was_cached_is_said_after_a_continuation_too() {
        let check = |first: Value, last: Value, expected: Value| {
            let shown = AnswerEdit {
                drop_usage: false,
                ..HIDDEN
            };
            let mut chat = transcript(Endpoint::Chat, shown);
            let begun = json!({"id": "c", "choices": [{"delta": {"content": "a"}, "token_ids": [1]}], "usage": first});
            take(&mut chat, &begun.to_string(), false);
            chat.begin_leg(true);
            let end = json!({"id": "d", "choices": [], "usage": last});
            let end: Value = serde_json::from_str(&take(&mut chat, &end.to_string(), true).unwrap()).unwrap();
            assert_eq!(
                end["usage"]["prompt_tokens_details"]["cached_tokens"], expected,
                "{first} {last}"
            );
        };
        let usage = |prompt: u32, cached: u32| json!(Usage::new(prompt, cached, 1));
        check(usage(10, 4), usage(11, 8), json!(4));
        check(Value::Null, usage(11, 8), json!(8));
        check(Value::Null, usage(11, 11), json!(10));
        check(
            Value::Null,
            json!({"prompt_tokens": 11, "completion_tokens": 1}),
            Value::Null,
        );
    }

    #[test]
    fn an_error_in_a_stream_is_a_fault() {
        let check = |data: &'static str, code: Option<&str>| {
            let mut chat = transcript(Endpoint::Chat, HIDDEN);
            let fault = chat.take(&Bytes::from_static(data.as_bytes()), false).unwrap_err();
            assert_eq!(fault.code.as_deref(), code, "{data}");
        };
        check(r#"{"error":{"message":"dead","type":"x","code":500}}"#, Some("500"));
        check(r#"{"error":{"message":"dead","code":"aborted"}}"#, Some("aborted"));
        check(r#"{"id":"c","choices":[{"delta":{},"finish_reason":"abort"}]}"#, None);
        check("nonsense", None);
    }

    #[test]
    fn an_answer_that_only_lacks_its_end_is_ended_here() {
        let mut text = transcript(
            Endpoint::Completions,
            AnswerEdit {
                drop_usage: false,
                ..HIDDEN
            },
        );
        take(
            &mut text,
            r#"{"id":"c","created":1,"choices":[{"text":"ab","token_ids":[1,2]}]}"#,
            false,
        );
        let chunks: Vec<Value> = text
            .closing_chunks(3)
            .iter()
            .map(|c| serde_json::from_slice(c).unwrap())
            .collect();
        assert_eq!(chunks[0]["choices"][0]["finish_reason"], "length");
        assert_eq!(chunks[1]["usage"]["total_tokens"], 5);
    }
}
