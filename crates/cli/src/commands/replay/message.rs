//! What a turn of a trace becomes on the wire.

use super::client::Outgoing;
use crate::args::{self, Form};
use bytes::Bytes;
use homing_workload::content::shrunk;
use homing_workload::{Trace, TurnRef, tokens_of, words_of};
use serde_json::{Value, json};
use std::time::Duration;

/// How turns are sent.
#[derive(Clone)]
pub struct Message {
    model: String,
    form: Form,
    shrink: u32,
    vocabulary: u32,
    timeout: Duration,
    /// Tells the sessions of this run from those of another, whose KV may still be cached.
    run: u64,
}

impl Message {
    /// How the turns of the run with this seed are sent.
    pub fn new(model: &str, args: &args::Replay, run: u64) -> Self {
        Self {
            model: model.to_owned(),
            form: args.form,
            shrink: args.shrink,
            vocabulary: args.vocabulary,
            timeout: Duration::from_secs(args.request_timeout),
            run,
        }
    }

    /// A count of tokens as this replay sends it.
    pub fn tokens(&self, tokens: u32) -> u32 {
        shrunk(tokens, self.shrink)
    }

    /// The request of a turn. Answers have the trace's length, so the model must not end them itself.
    pub fn of(&self, trace: &Trace, turn: TurnRef) -> Outgoing {
        let of = trace.turn(turn);
        let mut body = json!({
            "model": self.model,
            "max_tokens": self.tokens(of.output_tokens),
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let (path, member, prompt): (_, _, Value) = match self.form {
            Form::Ids => (
                "/v1/completions",
                "prompt",
                tokens_of(trace, turn, self.vocabulary, self.shrink).into(),
            ),
            Form::Chat => {
                let text = words_of(trace, turn, self.shrink);
                (
                    "/v1/chat/completions",
                    "messages",
                    json!([{"role": "user", "content": text}]),
                )
            }
        };
        body[member] = prompt;
        let session = &trace.sessions[turn.session as usize].id;
        Outgoing {
            path,
            session: session_name(self.run, session, of.agent),
            body: Bytes::from(body.to_string()),
            timeout: self.timeout,
        }
    }
}

/// The session header of an agent: of one run, within the header's bounds.
fn session_name(run: u64, session: &str, agent: u32) -> String {
    let visible: String = session.chars().filter(char::is_ascii_graphic).take(80).collect();
    if agent == 0 {
        format!("{visible}.{run}")
    } else {
        format!("{visible}.{run}.a{agent}")
    }
}
