//! Whether an engine gives a text the tokens that the router gives it: asked once for each of an engine's lives.
//!
//! All that the router knows of caches hangs on this: blocks are hashed from its own tokens. An engine that tokenises or
//! renders otherwise would be sent every turn as one that it has never seen. The texts are such that what usually
//! differs shows: a special token, white space, digits, other scripts, and a tool whose members are in no order.

use crate::fleet::Member;
use crate::tokenise::{Text, Tokeniser, ask_at};
use crate::upstream::Upstream;
use bytes::Bytes;
use homing_wire::openai::Body;
use std::time::Duration;

const PROMPT: &str = " Probe:\n\n\t12345 67,8  \u{e9}\u{df}\u{4e2d}\u{6587}\u{1f642} <|im_start|>don't()";
const CHAT: &[u8] = br#"{"messages":[{"role":"user","content":" Probe:  12345 \u00e9\u4e2d\n"}],"tools":[{"type":"function","function":{"name":"probe","description":"<b> & \u00e9","parameters":{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"number","default":1e-05}}}}}]}"#;

/// Compares, where the engine says its tokens and the router has its own; a difference is the tokeniser's to draw
/// consequences from.
pub(super) async fn compare(member: &Member, upstream: &Upstream, tokeniser: &Tokeniser, timeout: Duration) {
    let prompt = Text::Prompt {
        text: PROMPT.to_owned(),
        add_special_tokens: true,
    };
    let chat = Body::parse(&Bytes::from_static(CHAT)).map(Text::Chat);
    for text in [Ok(prompt), chat].into_iter().flatten() {
        // Without a template there is no chat, here or there.
        let Some(own) = tokeniser.own(&text) else { continue };
        match ask_at(&member.uri("/tokenize"), upstream, &text, timeout).await {
            Ok(tokens) if tokens == own => {}
            Ok(tokens) => return tokeniser.distrust(&member.name, &own, &tokens),
            Err(error) => {
                tracing::debug!(
                    worker = member.name,
                    error,
                    "an engine does not say its tokens, they are not compared"
                );
            }
        }
    }
}
