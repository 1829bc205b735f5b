//! The double's own tests: it says what SGLang's source says, without a router between.

mod events;

use super::{Act, Fabric, Mode, Sglang, Spec};
use crate::support::engine::answer_to;
use crate::support::{Caller, Events, Whole, text_of, whole};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

fn ids(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).collect()
}

fn completion(prompt: &[u32], max_tokens: usize) -> Value {
    json!({"model": "fake", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0})
}

fn with(mut body: Value, fields: &Value) -> Value {
    body.as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    body
}

#[track_caller]
fn assert_both_answered(p: &Whole, d: &Whole) {
    assert_eq!(
        (p.status.as_u16(), d.status.as_u16()),
        (200, 200),
        "{} {}",
        p.text,
        d.text
    );
}

/// A client that says that its bodies are JSON.
#[derive(Clone)]
struct Asker(Caller);

impl Asker {
    async fn send(&self, path: &str, body: &Value) -> ::http::Response<hyper::body::Incoming> {
        let headers = [("content-type", "application/json")];
        self.0
            .send(::http::Method::POST, path, &headers, body.to_string())
            .await
    }

    async fn post(&self, path: &str, body: &Value) -> Whole {
        whole(self.send(path, body).await).await
    }

    async fn stream(&self, path: &str, body: &Value) -> Events {
        Events::new(self.send(path, body).await)
    }

    async fn get(&self, path: &str) -> Whole {
        self.0.get(path).await
    }
}

fn caller(server: &Sglang) -> Asker {
    Asker(Caller::new(server.address))
}

struct Pair {
    fabric: Arc<Fabric>,
    prefill: Sglang,
    decode: Sglang,
}

impl Pair {
    async fn start(change: impl Fn(&mut Spec)) -> Self {
        let fabric = Arc::new(Fabric::default());
        let spec = |mode| {
            let mut spec = Spec::new(mode);
            change(&mut spec);
            spec
        };
        let prefill = Sglang::start(spec(Mode::Prefill), &fabric).await;
        let decode = Sglang::start(spec(Mode::Decode), &fabric).await;
        Self {
            fabric,
            prefill,
            decode,
        }
    }

    fn bootstrap(&self, room: u64) -> Value {
        json!({"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap_port, "bootstrap_room": room})
    }

    /// Asks both sides at once.
    async fn both(&self, room: u64, at_prefill: Value, at_decode: Value) -> (Whole, Whole) {
        let (p, d) = (caller(&self.prefill), caller(&self.decode));
        let (at_prefill, at_decode) = (
            with(at_prefill, &self.bootstrap(room)),
            with(at_decode, &self.bootstrap(room)),
        );
        tokio::join!(
            p.post("/v1/completions", &at_prefill),
            d.post("/v1/completions", &at_decode)
        )
    }

    /// Sends one side's request on its own.
    fn one(&self, server: &Sglang, body: Value) -> tokio::task::JoinHandle<Whole> {
        let client = caller(server);
        tokio::spawn(async move { client.post("/v1/completions", &body).await })
    }
}

#[tokio::test]
async fn the_legs_meet_and_the_answer_is_that_of_one_server() {
    let pair = Pair::start(|_| {}).await;
    let prompt = ids(1, 40);
    let (prefilled, decoded) = pair.both(7, completion(&prompt, 6), completion(&prompt, 6)).await;
    assert_eq!(
        (prefilled.status.as_u16(), decoded.status.as_u16()),
        (200, 200),
        "{} {}",
        prefilled.text,
        decoded.text
    );
    let text = answer_to(&prompt, 6);
    assert_eq!(decoded.json()["choices"][0]["text"], text);
    let prefill = prefilled.json();
    assert_eq!(
        (&prefill["choices"][0]["text"], &prefill["usage"]["completion_tokens"]),
        (&json!(text[..1]), &json!(1))
    );
    assert_eq!(pair.prefill.cached(&prompt), [32]);
    // The next turn: both sides have whole pages, and D says what P had, or more of its own.
    let longer = [prompt, ids(60, 30)].concat();
    let (_, decoded) = pair.both(8, completion(&longer, 2), completion(&longer, 2)).await;
    assert_eq!(
        decoded.json()["usage"]["prompt_tokens_details"],
        json!({"cached_tokens": 32})
    );
    assert_eq!((pair.prefill.open_rooms(), pair.decode.faults().len()), (0, 0));
}

#[tokio::test]
async fn a_leg_without_its_peer_waits_and_then_fails() {
    let pair = Pair::start(|spec| {
        spec.waits.bootstrap = Duration::from_millis(30);
        spec.waits.waiting = Duration::from_millis(30);
    })
    .await;
    let body = |room| with(completion(&ids(1, 20), 3), &pair.bootstrap(room));
    let check = |whole: Whole, status: u16, words: &str| {
        assert!(
            whole.status.as_u16() == status && whole.text.contains(words),
            "{words}: {} {}",
            whole.status,
            whole.text
        );
    };
    let (p, d) = (caller(&pair.prefill), caller(&pair.decode));
    check(
        p.post("/v1/completions", &body(1)).await,
        500,
        "in KVPoll.Bootstrapping",
    );
    check(
        d.post("/v1/completions", &body(2)).await,
        500,
        "in KVPoll.WaitingForInput",
    );
    let bare = completion(&ids(1, 20), 3);
    check(p.post("/v1/completions", &bare).await, 400, "without bootstrap room id");
    check(d.post("/v1/completions", &bare).await, 400, "without bootstrap room id");
    let wrong = with(
        bare.clone(),
        &json!({"bootstrap_host": "127.0.0.9", "bootstrap_room": 3}),
    );
    check(d.post("/v1/completions", &wrong).await, 500, "Decode handshake failed");
    assert!(pair.decode.faults().is_empty());
    let hostless = with(bare.clone(), &json!({"bootstrap_room": 3}));
    check(d.post("/v1/completions", &hostless).await, 500, "no bootstrap host");
    assert_eq!(pair.decode.faults().len(), 1);
    // A stream says it with status 200, as its first event.
    let mut events = d
        .stream("/v1/completions", &with(body(4), &json!({"stream": true})))
        .await;
    assert_eq!(events.status, 200);
    let (events, done) = events.rest().await;
    assert!(
        done && events[0]["error"]["type"] == "INTERNAL_SERVER_ERROR" && events[0]["error"]["code"] == 500,
        "{events:?}"
    );
}

#[tokio::test]
async fn a_room_is_refused_while_it_is_in_use() {
    let pair = Pair::start(|_| {}).await;
    let body = with(completion(&ids(1, 20), 3), &pair.bootstrap(5));
    let first = pair.one(&pair.decode, body.clone());
    pair.prefill
        .until("the decode side waits", |server| server.receivers() == 1)
        .await;
    let second = caller(&pair.decode).post("/v1/completions", &body).await;
    assert!(
        second.status == 500 && second.text.contains("Duplicate decode bootstrap room"),
        "{}",
        second.text
    );
    assert_eq!(pair.decode.faults().len(), 1);
    let prefill = caller(&pair.prefill).post("/v1/completions", &body).await;
    assert_eq!(
        (prefill.status.as_u16(), first.await.unwrap().status.as_u16()),
        (200, 200)
    );
}

#[tokio::test]
async fn a_wrong_prompt_on_one_leg_shows() {
    let pair = Pair::start(|_| {}).await;
    let (ours, theirs) = (ids(1, 40), ids(80, 40));
    let (_, decoded) = pair.both(1, completion(&theirs, 4), completion(&ours, 4)).await;
    assert_eq!(
        decoded.json()["choices"][0]["text"],
        answer_to(&theirs, 4),
        "the KV is P's, whatever D was asked"
    );
    // And it stays: D's cache holds it under the tokens of its request.
    let longer = [ours.clone(), ids(1, 8)].concat();
    let (_, decoded) = pair.both(2, completion(&longer, 4), completion(&longer, 4)).await;
    assert_ne!(decoded.json()["choices"][0]["text"], answer_to(&longer, 4));
    let (_, decoded) = pair.both(3, completion(&ids(1, 90), 4), completion(&ours, 4)).await;
    assert!(
        decoded.status == 500 && pair.decode.faults().len() == 1,
        "{}",
        decoded.text
    );
}

#[tokio::test]
async fn a_side_that_ends_tells_the_other_what_sglang_tells_it() {
    let mut pair = Pair::start(|_| {}).await;
    let rid = |rid: &str| json!({"rid": rid});
    let body = |room| with(completion(&ids(1, 40), 4), &pair.bootstrap(room));
    // D is aborted while P has not sent: P's leg fails too.
    pair.prefill.hold_transfers();
    let p = pair.one(&pair.prefill, body(1));
    let d = pair.one(&pair.decode, with(body(1), &rid("turn-1")));
    pair.prefill
        .until("both are there", |server| server.open() == 1 && server.receivers() == 1)
        .await;
    caller(&pair.decode).post("/abort_request", &rid("turn-1")).await;
    let d = d.await.unwrap();
    assert!(d.status == 500 && d.text.contains("Aborted by AbortReq."), "{}", d.text);
    let p = p.await.unwrap();
    assert!(
        p.status == 500 && p.text.contains("unknown reason from another rank"),
        "{}",
        p.text
    );
    // The KV cannot be sent: both are told.
    pair.prefill.on_next(Act::FailTransfer);
    pair.prefill.release_transfers(1);
    let (p, d) = pair
        .both(2, completion(&ids(1, 40), 4), completion(&ids(1, 40), 4))
        .await;
    assert!(
        p.status == 500 && d.status == 500 && d.text.contains("Failed to send kv chunk"),
        "{} {}",
        p.text,
        d.text
    );
    // P dies between the legs: D notices by its heartbeats.
    let d = pair.one(&pair.decode, body(3));
    let p = pair.one(&pair.prefill, body(3));
    pair.prefill
        .until("both are there", |server| server.open() == 1 && server.receivers() == 1)
        .await;
    pair.prefill.kill().await;
    let d = d.await.unwrap();
    assert!(
        d.status == 500 && d.text.contains("Lost connection with prefill instance"),
        "{}",
        d.text
    );
    assert!(p.await.is_err(), "its connection broke");
    pair.prefill.revive().await;
    let (_, d) = pair
        .both(4, completion(&ids(1, 40), 4), completion(&ids(1, 40), 4))
        .await;
    assert_eq!(
        d.json()["choices"][0]["text"],
        answer_to(&ids(1, 40), 4),
        "its next life serves"
    );
}

#[tokio::test]
async fn an_abort_in_a_stream_looks_like_an_end() {
    let fabric = Arc::new(Fabric::default());
    let server = Sglang::start(Spec::new(Mode::Null), &fabric).await;
    server.hold_tokens();
    server.release_tokens(2);
    let body = |rid: &str| {
        json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": true, "rid": rid,
            "stream_options": {"include_usage": true}})
    };
    let client = caller(&server);
    let mut events = client.stream("/v1/chat/completions", &body("a-1")).await;
    events.next().await.unwrap();
    let duplicate = client.post("/v1/chat/completions", &body("a-1")).await;
    assert!(
        duplicate.status == 400 && duplicate.text.contains("Duplicate request ID detected"),
        "{}",
        duplicate.text
    );
    let other = tokio::spawn({
        let (client, body) = (client.clone(), body("a-12"));
        async move { client.stream("/v1/chat/completions", &body).await.rest().await }
    });
    server.until("both are under way", |server| server.open() == 2).await;
    client.post("/abort_request", &json!({"rid": "a"})).await;
    assert_eq!(server.aborted(), 0, "an id that is not under way");
    client.post("/abort_request", &json!({"rid": "a-1"})).await;
    let (events, done) = events.rest().await;
    let finish: Vec<&Value> = events
        .iter()
        .filter_map(|event| event["choices"].get(0))
        .map(|choice| &choice["finish_reason"])
        .collect();
    assert!(done && finish.last() == Some(&&json!("abort")), "{events:?}");
    assert!(events.last().unwrap()["usage"].is_object(), "{events:?}");
    other.await.unwrap();
    assert_eq!(
        (server.aborted(), server.faults().len()),
        (2, 1),
        "the scheduler compares beginnings"
    );
}

#[tokio::test]
async fn it_does_as_it_is_told() {
    let server = Sglang::start(Spec::new(Mode::Null), &Arc::default()).await;
    assert_eq!(server.url(), format!("http://{}", server.address));
    let client = caller(&server);
    let body = with(completion(&ids(1, 5), 3), &json!({"bootstrap_room": 9}));
    server.on_next(Act::Refuse(503));
    assert_eq!(client.post("/v1/completions", &body).await.status, 503);
    server.on_next(Act::AbortAfter(1));
    let aborted = client.post("/v1/completions", &body).await;
    assert_eq!(
        (aborted.status.as_u16(), &aborted.json()["choices"][0]["finish_reason"]),
        (200, &json!("abort"))
    );
    server.on_next(Act::CutAfter(1));
    let asked = tokio::spawn({
        let (client, body) = (client.clone(), body.clone());
        async move { client.post("/v1/completions", &body).await }
    });
    assert!(asked.await.is_err(), "its connection is cut");
    server.on_next(Act::Hang);
    let hanging = tokio::spawn({
        let (client, body) = (client.clone(), with(body, &json!({"rid": "stuck"})));
        async move { client.post("/v1/completions", &body).await }
    });
    server.until("it hangs", |server| server.open() == 1).await;
    client.post("/abort_request", &json!({"abort_all": true})).await;
    assert_eq!(hanging.await.unwrap().json()["choices"][0]["finish_reason"], "abort");
    let seen = server.seen();
    assert_eq!(
        (seen.len(), seen[3].room(), seen[3].body["rid"].as_str()),
        (4, Some(9), Some("stuck"))
    );
    assert_eq!((seen[0].path.as_str(), seen[0].rank), ("/v1/completions", 0));
    assert_eq!(seen[0].headers["content-type"], "application/json");
    assert_eq!(
        (client.get("/health").await.status.as_u16(), server.times_described()),
        (200, 0)
    );
    server.set_sick(true);
    assert_eq!(client.get("/health").await.status, 503);
}

#[tokio::test]
async fn a_client_that_hangs_up_is_noticed_late() {
    let mut spec = Spec::new(Mode::Null);
    spec.waits.disconnect = Duration::from_millis(50);
    let server = Sglang::start(spec, &Arc::default()).await;
    server.hold_tokens();
    server.release_tokens(1);
    let mut events = caller(&server)
        .stream(
            "/v1/completions",
            &with(completion(&ids(1, 5), 9), &json!({"stream": true})),
        )
        .await;
    events.next().await.unwrap();
    drop(events);
    server
        .until("it has noticed", |server| server.open() == 0 && server.hung_up() == 1)
        .await;
}

#[tokio::test]
async fn each_way_to_ask_has_its_form() {
    let server = Sglang::start(Spec::new(Mode::Null), &Arc::default()).await;
    let untyped = Caller::new(server.address)
        .post("/v1/completions", &completion(&ids(1, 3), 1))
        .await;
    assert!(
        untyped.status == 400 && untyped.text.contains("Only 'application/json' is allowed"),
        "{}",
        untyped.text
    );
    let mut spec = Spec::new(Mode::Null);
    spec.cache_report = false;
    let server = Sglang::start(spec, &Arc::default()).await;
    let client = caller(&server);
    let prompt = ids(1, 20);
    let usage = json!({"include_usage": true});
    let asked = with(
        completion(&prompt, 3),
        &json!({"stream": true, "return_token_ids": true, "stream_options": usage}),
    );
    let (events, done) = client.stream("/v1/completions", &asked).await.rest().await;
    assert!(done && events.len() == 4, "{events:?}");
    assert_eq!(
        (text_of(&events), &events[0]["choices"][0]["prompt_token_ids"]),
        (answer_to(&prompt, 3), &json!(prompt))
    );
    assert_eq!(events[2]["choices"][0]["finish_reason"], "length");
    assert!(
        events
            .iter()
            .take(3)
            .all(|event| event["choices"][0]["token_ids"].as_array().unwrap().len() == 1)
    );
    assert_eq!(
        events[3]["usage"]["prompt_tokens_details"],
        Value::Null,
        "without --enable-cache-report"
    );
    let generated = client
        .post(
            "/generate",
            &json!({"input_ids": prompt, "sampling_params": {"max_new_tokens": 3}}),
        )
        .await
        .json();
    assert_eq!(
        (&generated["text"], &generated["meta_info"]["cached_tokens"]),
        (&json!(answer_to(&prompt, 3)), &json!(16))
    );
    assert_eq!(
        generated["meta_info"]["finish_reason"],
        json!({"type": "length", "length": 3})
    );
}

#[tokio::test]
async fn a_stream_of_chat_has_no_place_for_tokens() {
    let server = Sglang::start(Spec::new(Mode::Null), &Arc::default()).await;
    let client = caller(&server);
    // Chat: the role, the pieces, the finish; no tokens but in `sglext`.
    let messages = json!([{"role": "user", "content": "hi"}]);
    let chat = json!({"model": "m", "messages": messages, "max_tokens": 2, "stream": true});
    let refused = client
        .post(
            "/v1/chat/completions",
            &with(chat.clone(), &json!({"return_token_ids": true})),
        )
        .await;
    assert!(
        refused.status == 400 && refused.json()["object"] == "error" && refused.json()["code"] == 400,
        "{}",
        refused.text
    );
    let asked = with(
        chat,
        &json!({"return_output_ids_in_sglext": true, "return_cached_tokens_details": true}),
    );
    let (events, _) = client.stream("/v1/chat/completions", &asked).await.rest().await;
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(events[3]["choices"][0]["finish_reason"], "length");
    let extension = &events[4]["sglext"];
    assert_eq!(extension["cached_tokens_details"], json!({"device": 0, "host": 0}));
    assert_eq!(extension["output_ids"][0].as_array().unwrap().len(), 2);
    let tokens = client.post("/tokenize", &json!({"messages": messages})).await.json();
    assert_eq!(
        tokens["count"].as_u64().unwrap() as usize,
        crate::support::tokens_of(&messages).len()
    );
}

#[tokio::test]
async fn what_a_server_says_about_itself_follows_its_command_line() {
    let fabric = Arc::new(Fabric::default());
    let info = async |spec: Spec| {
        let server = Sglang::start(spec, &fabric).await;
        let info = caller(&server).get("/get_server_info").await.json();
        assert_eq!(info, caller(&server).get("/server_info").await.json());
        (info, server)
    };
    let mut spec = Spec::new(Mode::Decode);
    (spec.dp_size, spec.radix, spec.metrics) = (2, false, false);
    let (page, decode) = info(spec).await;
    assert_eq!(
        (&page["disaggregation_mode"], &page["disable_radix_cache"]),
        (&json!("decode"), &json!(true))
    );
    assert_eq!(
        (&page["kv_events"]["dp_size"], &page["kv_events"]["block_size"]),
        (&json!(2), &json!(16))
    );
    assert_eq!(page.get("disaggregation_decode_enable_conditional_agg"), None);
    assert_eq!(caller(&decode).get("/metrics").await.status, 404);
    let mut spec = Spec::new(Mode::Null);
    spec.events = None;
    let (page, mut server) = info(spec).await;
    assert_eq!(page["kv_events"], Value::Null);
    let metrics = caller(&server).get("/metrics").await.text;
    assert!(
        metrics.contains("sglang:num_running_reqs{engine_type=\"unified\"") && !metrics.contains("process_start"),
        "{metrics}"
    );
    let seed = page["random_seed"].clone();
    server.revive().await;
    assert_ne!(
        caller(&server).get("/server_info").await.json()["random_seed"],
        seed,
        "each life draws its own"
    );
}

#[tokio::test]
async fn ranks_have_their_own_caches_and_their_own_words() {
    let pair = Pair::start(|spec| spec.dp_size = 2).await;
    let prompt = ids(1, 40);
    let (p, d) = pair
        .both(
            6,
            completion(&prompt, 2),
            with(completion(&prompt, 2), &json!({"routed_dp_rank": 1})),
        )
        .await;
    assert_both_answered(&p, &d);
    assert_eq!(
        (pair.prefill.cached(&prompt), pair.decode.cached(&prompt)),
        (vec![32, 0], vec![0, 32])
    );
    // P follows the room's number, unless both legs are told another rank.
    let elsewhere = json!({"routed_dp_rank": 1});
    let body = with(with(completion(&prompt, 2), &pair.bootstrap(8)), &elsewhere);
    let p = caller(&pair.prefill).post("/v1/completions", &body).await;
    assert!(
        p.status == 500 && p.text.contains("follow_bootstrap_room conflict"),
        "{}",
        p.text
    );
    let told = json!({"disagg_prefill_dp_rank": 1});
    let (p, d) = pair
        .both(
            10,
            with(with(completion(&prompt, 2), &elsewhere), &told),
            with(completion(&prompt, 2), &told),
        )
        .await;
    assert_both_answered(&p, &d);
    assert_eq!(pair.prefill.cached(&prompt), [32, 32]);
    let out = caller(&pair.decode)
        .post(
            "/v1/completions",
            &with(completion(&prompt, 2), &json!({"routed_dp_rank": 2})),
        )
        .await;
    assert!(
        out.status == 400 && out.text.contains("out of range [0, 2)"),
        "{}",
        out.text
    );
    assert!(pair.fabric.find("127.0.0.1:1").is_none());
}
