//! The gateway before SGLang servers, as the double of `sglang_double` speaks for them. No real server was run: SGLang
//! does not start without a GPU.

use crate::sglang_double::{Act, EventForm, Fabric, Mode, Seen, Sglang, Spec};
use crate::support::engine::answer_to;
use crate::support::{Caller, chat, conversation, quick, text_of, tokens_of, whole};
use homing_gateway::{EngineKind, Gateway, GatewayConfig, WorkerSpec};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// A gateway and its servers.
struct Cluster {
    gateway: Gateway,
    servers: Vec<Sglang>,
    client: Caller,
}

/// The same for each rank of a server, where it has several.
fn workers(servers: &[Sglang]) -> Vec<WorkerSpec> {
    let of = |server: &Sglang| {
        let (url, ranks) = (server.url(), server.spec().dp_size);
        let worker = move |rank: u32| WorkerSpec {
            data_parallel_rank: (ranks > 1).then_some(rank),
            ..WorkerSpec::new(url.clone(), EngineKind::Sglang)
        };
        (0..ranks).map(worker)
    };
    servers.iter().flat_map(of).collect()
}

impl Cluster {
    /// Starts and waits until every worker has joined.
    async fn start(specs: Vec<Spec>) -> Self {
        let cluster = Self::start_unready(specs, |_| {}).await;
        cluster.until_joined().await;
        cluster
    }

    async fn start_unready(specs: Vec<Spec>, change: impl FnOnce(&mut GatewayConfig)) -> Self {
        let fabric = Arc::new(Fabric::default());
        let mut servers = Vec::new();
        for spec in specs {
            servers.push(Sglang::start(spec, &fabric).await);
        }
        let mut config = GatewayConfig {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            workers: workers(&servers),
            tokenizer: Some("tiny".to_owned()),
            clocks: quick(),
            ..GatewayConfig::default()
        };
        // Prompts of tests are short; let them go through a prefill worker all the same.
        config.router.policy = "homing:local_tokens=8".parse().unwrap();
        config.router.clocks.backoff_base = Duration::from_millis(1);
        config.router.clocks.backoff_cap = Duration::from_millis(20);
        change(&mut config);
        let gateway = Gateway::start(config).await.unwrap();
        let client = Caller::new(gateway.local_addr());
        Self {
            gateway,
            servers,
            client,
        }
    }

    async fn until_joined(&self) {
        let count = workers(&self.servers).len();
        let joined = |page: &Value| states(page).iter().filter(|state| is_up(state)).count() == count;
        self.client.until("/admin/workers", "all workers joined", joined).await;
    }

    async fn ask(&self, messages: &Value, max_tokens: usize) -> crate::support::Whole {
        self.client
            .post("/v1/chat/completions", &chat(messages, max_tokens, false))
            .await
    }

    /// Waits until neither the router nor a server is at work on anything, and says whether SGLang had lived.
    async fn until_quiet(&self) {
        let idle = |page: &Value| page["in_flight_requests"] == 0 && page["queued_requests"] == 0;
        self.client.until("/admin/workers", "nothing in flight", idle).await;
        for server in &self.servers {
            let quiet = |server: &Sglang| server.open() == 0 && server.open_rooms() == 0;
            server.until("no leg and no room is left", quiet).await;
            assert_eq!(server.faults(), Vec::<String>::new());
        }
    }

    fn of(&self, mode: Mode) -> &Sglang {
        self.servers.iter().find(|server| server.spec().mode == mode).unwrap()
    }
}

fn states(page: &Value) -> Vec<&str> {
    let data = page["data"].as_array().unwrap();
    data.iter().map(|worker| worker["state"].as_str().unwrap()).collect()
}

fn is_up(state: &str) -> bool {
    ["exact", "degraded", "predicted"].contains(&state)
}

fn pd(change: impl Fn(&mut Spec)) -> Vec<Spec> {
    let spec = |mode| {
        let mut spec = Spec::new(mode);
        change(&mut spec);
        spec
    };
    vec![spec(Mode::Prefill), spec(Mode::Decode)]
}

fn text(answer: &crate::support::Whole) -> String {
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()["choices"][0]["message"]["content"]
        .as_str()
        .unwrap()
        .to_owned()
}

/// A conversation that goes on.
fn next_turn(messages: &mut Value, answer: &str, question: &str) {
    let list = messages.as_array_mut().unwrap();
    list.push(json!({"role": "assistant", "content": answer}));
    list.push(json!({"role": "user", "content": question}));
}

/// What both legs of a turn must share, and what no two turns may.
fn assert_pairs(prefills: &[Seen], decodes: &[Seen], bootstrap_port: u16) {
    assert_eq!(prefills.len(), decodes.len());
    let mut rooms = BTreeSet::new();
    for decode in decodes {
        let room = decode.room().expect("each decode leg has a room");
        assert!(
            room > 0 && i64::try_from(room).is_ok(),
            "room {room} does not fit SGLang's metadata"
        );
        assert!(rooms.insert(room), "room {room} is used twice");
        assert_eq!(decode.body["bootstrap_host"], "127.0.0.1");
        assert_eq!(decode.body["bootstrap_port"], json!(bootstrap_port));
        let prefill = prefills
            .iter()
            .find(|prefill| prefill.room() == Some(room))
            .expect("its prefill leg");
        for field in ["prompt", "messages", "input_ids", "tools"] {
            assert_eq!(prefill.body[field], decode.body[field], "{field}");
        }
        assert_ne!(
            (prefill.body["rid"].as_str(), prefill.body["rid"].is_null()),
            (decode.body["rid"].as_str(), false),
            "each leg has an id of its own"
        );
    }
}

#[tokio::test]
async fn a_turn_is_sent_to_both_sides_at_once_and_answered_as_by_one_server() {
    let cluster = Cluster::start(pd(|_| {})).await;
    for turn in 0..3 {
        let messages = conversation(&format!("w{turn}"), 60);
        let expected = answer_to(&tokens_of(&messages), 6);
        let answer = cluster.ask(&messages, 6).await;
        assert_eq!(text(&answer), expected);
        assert_eq!(answer.header("x-homing-path"), Some("seed"), "{:?}", answer.headers);
        assert_eq!(answer.json()["usage"]["completion_tokens"], 6);
        let other = conversation(&format!("s{turn}"), 60);
        let mut events = cluster
            .client
            .stream("/v1/chat/completions", &chat(&other, 6, true))
            .await;
        let (events, done) = events.rest().await;
        assert!(done, "{events:?}");
        assert_eq!(text_of(&events), answer_to(&tokens_of(&other), 6));
    }
    let (prefill, decode) = (cluster.of(Mode::Prefill), cluster.of(Mode::Decode));
    assert_eq!(decode.seen().len(), 6);
    assert_pairs(&prefill.seen(), &decode.seen(), prefill.bootstrap_port);
    cluster.until_quiet().await;
}

#[tokio::test]
async fn later_turns_go_through_p_too_where_d_cannot_prefill() {
    for radix in [true, false] {
        let mut specs = pd(|_| {});
        specs[1].radix = radix;
        let cluster = Cluster::start(specs).await;
        let mut messages = conversation("word", 60);
        for turn in 0..3 {
            let answer = cluster.ask(&messages, 8).await;
            let said = text(&answer);
            assert_eq!(said, answer_to(&tokens_of(&messages), 8), "turn {turn}, radix {radix}");
            assert_ne!(
                answer.header("x-homing-path"),
                Some("append"),
                "turn {turn}, radix {radix}"
            );
            next_turn(&mut messages, &said, "and then?");
        }
        let (prefill, decode) = (cluster.of(Mode::Prefill), cluster.of(Mode::Decode));
        assert_pairs(&prefill.seen(), &decode.seen(), prefill.bootstrap_port);
        assert!(decode.seen().iter().all(|seen| seen.body["do_local_prefill"] != true));
        cluster.until_quiet().await;
    }
}

#[tokio::test]
async fn later_turns_stay_on_a_d_that_says_it_can_prefill() {
    let cluster = Cluster::start(pd(|spec| spec.local_prefill = spec.mode == Mode::Decode)).await;
    let mut messages = conversation("word", 60);
    let mut paths = Vec::new();
    for turn in 0..3 {
        let answer = cluster.ask(&messages, 8).await;
        let said = text(&answer);
        assert_eq!(said, answer_to(&tokens_of(&messages), 8), "turn {turn}");
        paths.push(answer.header("x-homing-path").unwrap().to_owned());
        next_turn(&mut messages, &said, "and then?");
        cluster.until_quiet().await;
    }
    assert_eq!(paths, ["seed", "append", "append"]);
    let decodes = cluster.of(Mode::Decode).seen();
    assert_eq!(cluster.of(Mode::Prefill).seen().len(), 1);
    for decode in &decodes[1..] {
        assert_eq!(
            (decode.body["do_local_prefill"].as_bool(), decode.room()),
            (Some(true), None),
            "{}",
            decode.body
        );
    }
}

#[tokio::test]
async fn what_the_router_expects_in_the_cache_is_what_the_server_reports() {
    for form in [EventForm::Map, EventForm::Array] {
        let mut spec = Spec::new(Mode::Null);
        spec.events = Some(form);
        let cluster = Cluster::start(vec![spec]).await;
        let exact = |page: &Value| states(page) == ["exact"];
        cluster
            .client
            .until("/admin/workers", "its events are followed", exact)
            .await;
        let mut messages = conversation("word", 60);
        for turn in 0..4 {
            let answer = cluster.ask(&messages, 20).await;
            let said = text(&answer);
            let expected: u64 = answer.header("x-homing-cached-tokens").unwrap().parse().unwrap();
            let reported = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                .as_u64()
                .unwrap();
            assert_eq!(expected, reported, "turn {turn}, {form:?}");
            assert!(turn == 0 || reported >= 60, "turn {turn}: {reported}");
            next_turn(&mut messages, &said, "and then?");
            let blocks = tokens_of(&messages).len() / 16;
            let grown = |page: &Value| page["data"][0]["indexed_gpu_blocks"].as_u64().unwrap() as usize + 4 >= blocks;
            cluster.client.until("/admin/workers", "the events are in", grown).await;
        }
        cluster.until_quiet().await;
    }
}

#[tokio::test]
async fn lost_events_are_asked_for_again() {
    let cluster = Cluster::start(vec![Spec::new(Mode::Null)]).await;
    let server = &cluster.servers[0];
    let exact = |page: &Value| states(page) == ["exact"];
    cluster
        .client
        .until("/admin/workers", "its events are followed", exact)
        .await;
    server.lose_events(true);
    let lost = conversation("lost", 60);
    text(&cluster.ask(&lost, 4).await);
    server.lose_events(false);
    // The next batch shows the gap.
    let heard = conversation("heard", 60);
    text(&cluster.ask(&heard, 4).await);
    let all = (tokens_of(&lost).len() / 16 + tokens_of(&heard).len() / 16) as u64 - 1;
    let whole =
        |page: &Value| states(page) == ["exact"] && page["data"][0]["indexed_gpu_blocks"].as_u64().unwrap() >= all;
    cluster
        .client
        .until("/admin/workers", "the lost batches are in, too", whole)
        .await;
}

#[tokio::test]
async fn each_rank_is_a_worker_with_its_own_cache() {
    let cluster = Cluster::start(pd(|spec| spec.dp_size = 2)).await;
    let mut sessions: Vec<Value> = (0..6).map(|session| conversation(&format!("w{session}"), 60)).collect();
    for turn in 0..2 {
        for messages in &mut sessions {
            let answer = cluster.ask(messages, 5).await;
            let said = text(&answer);
            assert_eq!(said, answer_to(&tokens_of(messages), 5), "turn {turn}");
            next_turn(messages, &said, "and then?");
        }
    }
    let (prefill, decode) = (cluster.of(Mode::Prefill), cluster.of(Mode::Decode));
    assert_pairs(&prefill.seen(), &decode.seen(), prefill.bootstrap_port);
    for seen in decode.seen() {
        let routed = seen.body["routed_dp_rank"].as_u64().or_else(|| {
            let header = seen.headers.get("x-data-parallel-rank")?;
            header.to_str().ok()?.parse().ok()
        });
        assert_eq!(routed, Some(u64::from(seen.rank)), "D's rank is chosen by the router");
    }
    let ranks: BTreeSet<u32> = decode.seen().iter().map(|seen| seen.rank).collect();
    assert_eq!(ranks.len(), 2, "both ranks are used");
    cluster.until_quiet().await;
    let null = Cluster::start(vec![{
        let mut spec = Spec::new(Mode::Null);
        spec.dp_size = 2;
        spec
    }])
    .await;
    for session in 0..4 {
        let messages = conversation(&format!("n{session}"), 60);
        assert_eq!(text(&null.ask(&messages, 3).await), answer_to(&tokens_of(&messages), 3));
    }
    null.until_quiet().await;
}

#[tokio::test]
async fn a_p_that_dies_between_the_legs_costs_its_turn_another_try() {
    let mut specs = pd(|_| {});
    specs.insert(1, Spec::new(Mode::Prefill));
    let mut cluster = Cluster::start(specs).await;
    for server in &cluster.servers[..2] {
        server.hold_transfers();
    }
    let messages = conversation("word", 60);
    let asked = tokio::spawn({
        let (client, body) = (cluster.client.clone(), chat(&messages, 6, false));
        async move { client.post("/v1/chat/completions", &body).await }
    });
    cluster.servers[2]
        .until("both legs are there", |server| server.open() == 1)
        .await;
    let met = |server: &Sglang| server.open() == 1 && server.open_rooms() == 1;
    let busy = loop {
        match cluster.servers[..2].iter().position(met) {
            Some(busy) => break busy,
            None => tokio::task::yield_now().await,
        }
    };
    cluster.servers[1 - busy].release_transfers(1);
    cluster.servers[busy].kill().await;
    assert_eq!(text(&asked.await.unwrap()), answer_to(&tokens_of(&messages), 6));
    cluster.servers[busy].revive().await;
    cluster.until_quiet().await;
    let rooms: BTreeSet<_> = cluster.of(Mode::Decode).seen().iter().map(Seen::room).collect();
    assert_eq!(
        rooms.len(),
        cluster.of(Mode::Decode).seen().len(),
        "each try has a room of its own"
    );
}

#[tokio::test]
async fn whatever_d_does_wrong_p_is_released_and_the_client_gets_the_right_answer() {
    // P waits for 300 s for a decode leg that does not come: the router must not leave it waiting.
    for act in [
        Act::Refuse(500),
        Act::Refuse(503),
        Act::CutAfter(0),
        Act::CutAfter(2),
        Act::AbortAfter(0),
        Act::AbortAfter(2),
    ] {
        let cluster = Cluster::start(pd(|_| {})).await;
        cluster.of(Mode::Decode).on_next(act.clone());
        let messages = conversation("word", 60);
        let answer = cluster.ask(&messages, 6).await;
        assert_eq!(text(&answer), answer_to(&tokens_of(&messages), 6), "{act:?}");
        cluster.until_quiet().await;
    }
}

#[tokio::test]
async fn a_transfer_that_fails_is_an_error_or_another_try_never_an_answer() {
    for act in [Act::FailTransfer, Act::Refuse(500), Act::Refuse(503)] {
        for stream in [false, true] {
            let cluster = Cluster::start(pd(|_| {})).await;
            cluster.of(Mode::Prefill).on_next(act.clone());
            let messages = conversation("word", 60);
            let body = chat(&messages, 6, stream).to_string();
            let answer = whole(
                cluster
                    .client
                    .send(http::Method::POST, "/v1/chat/completions", &[], body)
                    .await,
            )
            .await;
            assert_eq!(answer.status, 200, "{act:?}: {}", answer.text);
            assert!(!answer.text.contains("error"), "{act:?}: {}", answer.text);
            assert_eq!(cluster.of(Mode::Decode).seen().len(), 2, "{act:?}: it was tried again");
            cluster.until_quiet().await;
        }
    }
}

/// A decode server dies after three tokens of eight; what the client has of its stream, and whether it was ended as meant.
async fn stream_of_a_dying_d(path: &str, body: &Value) -> (Vec<Value>, bool) {
    let mut specs = pd(|_| {});
    specs.push(Spec::new(Mode::Decode));
    let mut cluster = Cluster::start(specs).await;
    for server in &cluster.servers[1..] {
        server.hold_tokens();
        server.release_tokens(3);
    }
    let mut events = cluster.client.stream(path, body).await;
    let mut seen = Vec::new();
    while text_of(&seen).len() < 3 {
        seen.push(serde_json::from_str::<Value>(&events.next().await.unwrap()).unwrap());
    }
    let busy = 1 + cluster.servers[1..]
        .iter()
        .position(|server| server.open() == 1)
        .expect("one is at it");
    cluster.servers[3 - busy].release_tokens(8);
    cluster.servers[busy].kill().await;
    let (rest, done) = events.rest().await;
    seen.extend(rest);
    cluster.servers[busy].revive().await;
    cluster.until_quiet().await;
    (seen, done)
}

#[tokio::test]
async fn a_stream_goes_on_elsewhere_where_the_server_says_its_tokens() {
    let prompt: Vec<u32> = (1..60).collect();
    let body = json!({"model": "fake", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": true});
    let (seen, done) = stream_of_a_dying_d("/v1/completions", &body).await;
    assert!(done, "{seen:?}");
    assert_eq!(text_of(&seen), answer_to(&prompt, 8), "as if nothing had happened");
    // A stream of chat cannot say them: it ends with an error that says so, and what was sent is right.
    let messages = conversation("word", 60);
    let (seen, done) = stream_of_a_dying_d("/v1/chat/completions", &chat(&messages, 8, true)).await;
    assert!(
        !done && seen.last().unwrap()["error"]["code"] == "worker_lost",
        "{seen:?}"
    );
    assert_eq!(text_of(&seen), answer_to(&tokens_of(&messages), 3));
}

#[tokio::test]
async fn a_client_that_hangs_up_releases_both_legs() {
    let cluster = Cluster::start(pd(|_| {})).await;
    let (prefill, decode) = (cluster.of(Mode::Prefill), cluster.of(Mode::Decode));
    let ask = |word: &str| {
        let (client, body) = (cluster.client.clone(), chat(&conversation(word, 60), 6, true));
        tokio::spawn(async move { client.stream("/v1/chat/completions", &body).await })
    };
    // While the legs are about to meet.
    prefill.hold_transfers();
    let request = ask("first");
    prefill.until("its leg is there", |server| server.open() == 1).await;
    decode.until("its leg is there", |server| server.open() == 1).await;
    request.abort();
    prefill
        .until("its leg is released", |server| {
            server.open() == 0 && server.open_rooms() == 0
        })
        .await;
    decode.until("its leg is released", |server| server.open() == 0).await;
    // In the stream.
    prefill.release_transfers(100);
    decode.hold_tokens();
    decode.release_tokens(1);
    let mut events = ask("second").await.unwrap();
    events.next().await.unwrap();
    drop(events);
    decode.until("its leg is released", |server| server.open() == 0).await;
    cluster.until_quiet().await;
    assert_eq!(
        (prefill.hung_up(), decode.hung_up()),
        (0, 0),
        "they were told, not left to notice"
    );
    // Of two legs that are about to meet, the one that is told later has failed with the other, if that was quick.
    let (at_prefill, at_decode) = (prefill.aborted(), decode.aborted());
    assert!(
        at_prefill + at_decode >= 2 && at_decode >= 1,
        "{at_prefill} {at_decode}"
    );
}

#[tokio::test]
async fn what_does_not_fit_does_not_join() {
    type Change = fn(&mut Spec);
    let refused: [(Change, &str); 3] = [
        (|spec| spec.radix = false, "`disable_radix_cache` true"),
        (|spec| "other".clone_into(&mut spec.model), "found `other`"),
        (|spec| spec.page_size = 32, "the page size of w0, `16`, found `32`"),
    ];
    for (change, words) in refused {
        let mut odd = Spec::new(Mode::Null);
        change(&mut odd);
        let cluster = Cluster::start_unready(vec![Spec::new(Mode::Null), odd], |_| {}).await;
        let said = |page: &Value| {
            let problem = page["data"][1]["problem"].as_str().unwrap_or_default();
            is_up(states(page)[0]) && problem.starts_with("refused") && problem.contains(words)
        };
        cluster
            .client
            .until("/admin/workers", "it is refused, and why", said)
            .await;
        cluster.servers[1]
            .until("it is asked again", |server| server.times_described() >= 3)
            .await;
        for turn in 0..3 {
            let messages = conversation(&format!("w{turn}"), 30);
            assert_eq!(
                text(&cluster.ask(&messages, 3).await),
                answer_to(&tokens_of(&messages), 3),
                "{words}"
            );
        }
        assert_eq!(cluster.servers[1].seen().len(), 0, "{words}");
    }
}

#[tokio::test]
async fn a_server_without_events_joins_and_is_predicted() {
    let mut spec = Spec::new(Mode::Null);
    spec.events = None;
    let cluster = Cluster::start(vec![spec]).await;
    let mut messages = conversation("word", 60);
    for turn in 0..3 {
        let answer = cluster.ask(&messages, 4).await;
        let said = text(&answer);
        assert_eq!(said, answer_to(&tokens_of(&messages), 4));
        let expected: u64 = answer.header("x-homing-cached-tokens").unwrap().parse().unwrap();
        assert!(turn == 0 || expected > 200, "turn {turn}: {expected}");
        next_turn(&mut messages, &said, "and then?");
    }
    let page = cluster.client.get("/admin/workers").await.json();
    assert_eq!(states(&page), ["degraded"]);
}

#[tokio::test]
async fn a_server_that_restarted_holds_nothing() {
    let mut cluster = Cluster::start(vec![Spec::new(Mode::Null)]).await;
    let messages = conversation("word", 60);
    text(&cluster.ask(&messages, 4).await);
    let filled = |page: &Value| page["data"][0]["indexed_gpu_blocks"].as_u64().unwrap_or(0) > 3;
    cluster
        .client
        .until("/admin/workers", "its cache is known", filled)
        .await;
    let epoch = cluster.client.get("/admin/workers").await.json()["data"][0]["epoch"].clone();
    // SGLang needs tens of seconds to start, so probes miss it.
    cluster.servers[0].kill().await;
    let dead = |page: &Value| states(page) == ["dead"];
    cluster.client.until("/admin/workers", "it is dead", dead).await;
    cluster.servers[0].revive().await;
    let anew = |page: &Value| page["data"][0]["epoch"] != epoch && is_up(states(page)[0]);
    cluster
        .client
        .until("/admin/workers", "its next life is seen", anew)
        .await;
    let answer = cluster.ask(&messages, 4).await;
    assert_eq!(text(&answer), answer_to(&tokens_of(&messages), 4));
    assert_eq!(answer.header("x-homing-cached-tokens"), Some("0"), "nothing is assumed");
}

#[tokio::test]
async fn a_health_check_that_takes_its_second_is_no_death() {
    let mut spec = Spec::new(Mode::Null);
    spec.waits.health = Duration::from_secs(1);
    // The gateway's own clocks, not the quick ones of tests.
    let cluster = Cluster::start_unready(vec![spec], |config| config.clocks = GatewayConfig::default().clocks).await;
    cluster.until_joined().await;
    let messages = conversation("word", 60);
    for _ in 0..3 {
        assert_eq!(
            text(&cluster.ask(&messages, 4).await),
            answer_to(&tokens_of(&messages), 4)
        );
    }
    let page = cluster.client.get("/admin/workers").await.json();
    assert!(is_up(states(&page)[0]), "{page}");
    cluster.gateway.shutdown().await;
}
