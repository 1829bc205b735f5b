//! Legs to SGLang servers: their bodies, and the handoff in which both are sent at once (`proxy::pair`).
//!
//! Both bodies of a handoff are the client's with the same members added: the first token is sampled by the prefill
//! server, so it must know all of the sampling. SGLang's own balancers do the same.

use super::{Attempt, Flight};
use crate::engine::{Closed, Server};
use crate::proxy::abort::{Abort, command, tell_server};
use crate::proxy::leg::{DecodeLeg, LegRequest};
use crate::proxy::legs::{Endpoint, LegPrompt};
use crate::proxy::pair::{Pair, PairNews};
use crate::upstream::{Answer, LegError};
use bytes::Bytes;
use homing_router::action::{Dispatch, KvUse};
use homing_router::event::{Event, FailureCause, Leg, LegId};
use homing_wire::openai::{ApiError, Body};
use homing_wire::sglang::{Bootstrap, Routing, room};
use http::{HeaderValue, StatusCode};
use serde_json::json;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

/// What numbers of meetings are drawn from: keys that differ from process to process.
static DRAW: LazyLock<RandomState> = LazyLock::new(RandomState::new);

impl Flight {
    /// Sends a leg to an SGLang server; `false` where its worker is none.
    pub(super) async fn dispatch_to_sglang(&mut self, dispatch: Dispatch) -> bool {
        let Some(server) = self.shell.fleet.sglang(dispatch.worker) else {
            return false;
        };
        // `Import` finds its leg sent already.
        match dispatch.kv {
            KvUse::Export => {
                if let Err(error) = self.begin_pair(dispatch, &server) {
                    self.leg_failed(dispatch.leg, &error).await;
                }
            }
            KvUse::Import { .. } => match self.attempt.pair.as_mut().and_then(Pair::adopt) {
                Some(decode) => self.decode_leg(decode),
                None => {
                    let error = LegError::new(FailureCause::Transfer, "no prefill leg was sent along");
                    self.leg_failed(dispatch.leg, &error).await;
                }
            },
            KvUse::Local => {
                let routing = Routing {
                    local_prefill: server.local_prefill,
                    ..self.routing(dispatch)
                };
                let decode = self.sglang_leg(dispatch, &routing);
                self.decode_leg(decode);
            }
        }
        true
    }

    fn decode_leg(&mut self, decode: DecodeLeg) {
        self.transcript.begin_leg(self.attempt.continues);
        self.attempt.decode = Some(decode);
    }

    /// Sends both legs. The decode leg goes first: the prefill server waits for it.
    fn begin_pair(&mut self, prefill: Dispatch, server: &Server) -> Result<(), LegError> {
        let decision = self.decision.as_ref();
        let worker = decision.map(|decision| decision.decode).ok_or_else(|| {
            LegError::new(
                FailureCause::Engine,
                "a prefill leg was ordered before anything was decided",
            )
        })?;
        refuse_several(self.attempt.prompt.body())?;
        let decode = Dispatch {
            leg: LegId {
                leg: Leg::Decode,
                ..prefill.leg
            },
            worker,
            kv: KvUse::Import { from: prefill.worker },
            prefix_tokens: None,
        };
        let rank = self.shell.fleet.rank(prefill.worker);
        let (host, port) = server.bootstrap.clone();
        let random = DRAW.hash_one((self.shell.life, prefill.leg));
        let bootstrap = Bootstrap {
            host,
            port,
            room: room(random, rank.unwrap_or((random >> 32) as u32), server.ranks),
        };
        let meeting = |routing: Routing| Routing {
            bootstrap: Some(bootstrap.clone()),
            prefill_rank: rank,
            ..routing
        };
        let [decode, prefill] = [decode, prefill].map(|dispatch| {
            let routing = meeting(self.routing(dispatch));
            self.sglang_leg(dispatch, &routing)
        });
        self.attempt.pair = Some(Pair::new(decode, prefill));
        Ok(())
    }

    fn routing(&self, dispatch: Dispatch) -> Routing {
        Routing {
            rid: self.request.leg_name(dispatch.leg),
            rank: self.shell.fleet.rank(dispatch.worker),
            session_id: self.session_at(dispatch),
            ..Routing::default()
        }
    }

    /// The session's name at a server that keeps sessions apart; those that are over are closed.
    fn session_at(&self, dispatch: Dispatch) -> Option<String> {
        let Self { shell, request, .. } = self;
        let session = self.decision.as_ref()?.session;
        shell
            .fleet
            .sglang(dispatch.worker)
            .filter(|server| server.session_cache)?;
        let (name, closed) = shell.open_sessions.used(shell.clock.now(), dispatch.worker, session);
        let headers = request.leg_headers(dispatch.leg);
        for Closed { worker, name } in closed {
            let uri = shell.fleet.uri(worker, "/close_session");
            let over = command(&uri, &headers, &json!({ "session_id": name }));
            tell_server(shell.upstream.clone(), over);
        }
        Some(name)
    }

    fn sglang_leg(&self, dispatch: Dispatch, routing: &Routing) -> DecodeLeg {
        let request: LegRequest =
            self.leg_request(dispatch, &self.attempt.prompt, leg_body(&self.attempt.prompt, routing));
        let uri = self.shell.fleet.uri(dispatch.worker, "/abort_request");
        let upstream = self.shell.upstream.clone();
        let abort = Abort::of_request(upstream.clone(), &uri, &request.headers, &routing.rid);
        DecodeLeg::send(upstream, request).aborted_by(abort)
    }

    pub(super) async fn pair_said(&mut self, news: PairNews) {
        match news {
            PairNews::Arrived { leg, cached_tokens } => self.tell(Event::PrefillDone { leg, cached_tokens }).await,
            PairNews::Failed(leg, error) => self.leg_failed(leg, &error).await,
        }
    }

    /// Gives the legs of a handoff up, where this is one of its attempt.
    pub(super) fn cancel_pair(&mut self, leg: LegId) {
        if leg.attempt == self.attempt.number {
            self.attempt.pair = None;
        }
    }
}

impl Attempt {
    /// The answer is whole: what is left of its handoff may end by itself.
    pub(super) fn finish_pair(&mut self) {
        if let Some(pair) = self.pair.take() {
            pair.finish();
        }
    }
}

/// What comes of a pair, if there is one.
pub(super) async fn pair_news(pair: &mut Option<Pair>) -> PairNews {
    match pair {
        Some(pair) => pair.news().await,
        None => std::future::pending().await,
    }
}

/// The client's request with what the router adds. It is always streamed and always says its usage; tokens are asked for
/// where a stream can say them, which in SGLang is completions only.
fn leg_body(prompt: &LegPrompt, routing: &Routing) -> Bytes {
    let mut body = prompt.streamed();
    match prompt.endpoint() {
        Endpoint::Completions => body.set("return_token_ids", &true),
        Endpoint::Chat => drop(body.remove("return_token_ids")),
    }
    routing.apply(&mut body);
    body.to_bytes()
}

/// SGLang draws several answers from one meeting, and only one of them would find its KV there.
fn refuse_several(body: &Body) -> Result<(), LegError> {
    let several = ["n", "best_of"].into_iter().find_map(|name| {
        let count = body.read::<u32>(name, "an integer").ok().flatten()?;
        (count > 1).then_some((name, count))
    });
    let Some((name, count)) = several else { return Ok(()) };
    let error = ApiError::invalid(format!(
        "`{name}` is `{count}`, expected `1`: prefill and decode are apart here"
    ))
    .with_param(name);
    let mut refusal = LegError::new(FailureCause::Invalid, error.message.clone());
    refusal.answer = Some(Answer {
        status: StatusCode::BAD_REQUEST,
        content_type: Some(HeaderValue::from_static("application/json")),
        body: error.to_body(),
    });
    Err(refusal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn parsed(text: &str) -> Body {
        Body::parse(&text.to_owned().into()).unwrap()
    }

    #[test]
    fn a_leg_is_the_clients_request_with_where_to_meet() {
        let check = |endpoint, client: &str, expected: &str| {
            let prompt = LegPrompt::original(endpoint, Arc::new(parsed(client)), vec![1].into());
            let routing = Routing {
                rid: "r-0p".to_owned(),
                bootstrap: Some(Bootstrap {
                    host: "h".to_owned(),
                    port: 8998,
                    room: 5,
                }),
                ..Routing::default()
            };
            let body = leg_body(&prompt, &routing);
            assert_eq!(str::from_utf8(&body).unwrap(), expected, "{client}");
        };
        let meeting = r#""rid":"r-0p","bootstrap_host":"h","bootstrap_port":8998,"bootstrap_room":5}"#;
        check(
            Endpoint::Chat,
            r#"{"model":"m","messages":[1],"max_tokens":9,"min_tokens":2,"return_token_ids":true,"bootstrap_room":9}"#,
            &format!(
                r#"{{"model":"m","messages":[1],"max_tokens":9,"min_tokens":2,"stream":true,"stream_options":{{"include_usage":true}},{meeting}"#
            ),
        );
        check(
            Endpoint::Completions,
            r#"{"model":"m","prompt":[1,2],"max_tokens":9}"#,
            &format!(
                r#"{{"model":"m","prompt":[1,2],"max_tokens":9,"stream":true,"stream_options":{{"include_usage":true}},"return_token_ids":true,{meeting}"#
            ),
        );
    }

    #[test]
    fn several_answers_have_no_place_to_meet() {
        let check = |text: &str, refused: bool| assert_eq!(refuse_several(&parsed(text)).is_err(), refused, "{text}");
        check(r#"{"n":1}"#, false);
        check(r#"{"n":null}"#, false);
        check(r#"{"n":2}"#, true);
        check(r#"{"best_of":3}"#, true);
        let answer = refuse_several(&parsed(r#"{"n":2}"#)).unwrap_err().answer.unwrap();
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert!(String::from_utf8_lossy(&answer.body).contains("`n` is `2`"));
    }
}
