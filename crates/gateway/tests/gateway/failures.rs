//! What becomes of a turn when an engine fails it: continued so that the client cannot tell, or ended in so many words.

use crate::support::engine::{Act, Fake, answer_to};
use crate::support::{Caller, Cluster, Events, chat, conversation, messages, text_of, tokens_of, whole};
use homing_router::event::Role;
use http::Method;
use serde_json::{Value, json};

const PD: [Role; 2] = [Role::Prefill, Role::Decode];
const TWO: [Role; 2] = [Role::Both, Role::Both];

/// The engine that has a request open, and the other one.
fn split(cluster: &mut Cluster) -> (usize, usize) {
    let busy = cluster
        .engines
        .iter()
        .position(|engine| engine.open() > 0)
        .expect("some engine is at it");
    (busy, 1 - busy)
}

#[tokio::test]
async fn a_stream_goes_on_when_its_worker_is_killed() {
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let mut cluster = Cluster::start(&TWO).await;
        for engine in &cluster.engines {
            engine.hold();
            engine.release(3);
        }
        let messages = messages(30);
        let mut body = chat(&messages, 10, true);
        body["stream_options"] = json!({"include_usage": true});
        let mut prompt = tokens_of(&messages);
        if path == "/v1/completions" {
            prompt = (1..40).collect();
            body = json!({"model": "fake", "prompt": prompt, "max_tokens": 10, "temperature": 0, "stream": true,
                "stream_options": {"include_usage": true}});
        }
        let mut events = cluster.client.stream(path, &body).await;
        let mut seen = Vec::new();
        while text_of(&seen).len() < 3 {
            seen.push(serde_json::from_str::<Value>(&events.next().await.unwrap()).unwrap());
        }
        let (busy, other) = split(&mut cluster);
        cluster.engines[other].release(10);
        cluster.engines[busy].kill().await;
        let (rest, done) = events.rest().await;
        assert!(done, "{path}: {rest:?}");
        seen.extend(rest);
        assert_eq!(
            text_of(&seen),
            answer_to(&prompt, 10),
            "{path}: as if nothing had happened"
        );
        let usage = &seen.last().unwrap()["usage"];
        assert_eq!(
            (&usage["completion_tokens"], &usage["prompt_tokens"]),
            (&json!(10), &json!(prompt.len())),
            "{path}"
        );
        assert_eq!(
            usage["prompt_tokens_details"]["cached_tokens"], 3,
            "{path}: as engines say it"
        );
        for event in &seen {
            assert_eq!(
                (&event["id"], &event["object"]),
                (&seen[0]["id"], &seen[0]["object"]),
                "{path}"
            );
        }
        let continued = cluster.engines[other].decodes().pop().unwrap();
        assert_eq!(continued.path, "/v1/completions");
        assert_eq!(continued.body["max_tokens"], 7);
        assert_eq!(continued.body["prompt"].as_array().unwrap().len(), prompt.len() + 3);
        let log = cluster.turn().await;
        assert_eq!((log.error, log.replans, log.output_tokens), (None, 1, 10));
        cluster.until_idle().await;
    }
}

#[tokio::test]
async fn a_stream_goes_on_from_the_prompt_that_its_engine_had() {
    let mut cluster = Cluster::start(&TWO).await;
    for engine in &cluster.engines {
        engine.render_oddly();
        engine.hold();
        engine.release(3);
    }
    let messages = messages(30);
    let mut body = chat(&messages, 10, true);
    body["chat_template_kwargs"] = json!({"style": "odd"});
    let mut events = cluster.client.stream("/v1/chat/completions", &body).await;
    let mut seen = Vec::new();
    while text_of(&seen).len() < 3 {
        seen.push(serde_json::from_str::<Value>(&events.next().await.unwrap()).unwrap());
    }
    let (busy, other) = split(&mut cluster);
    cluster.engines[other].release(10);
    cluster.engines[busy].kill().await;
    let (rest, done) = events.rest().await;
    seen.extend(rest);
    assert!(done, "{seen:?}");
    let prompt = [vec![0], tokens_of(&messages)].concat();
    assert_eq!(text_of(&seen), answer_to(&prompt, 10));
    assert!(
        seen.iter().all(|event| event.get("prompt_token_ids").is_none()),
        "nobody asked for them"
    );
}

#[tokio::test]
async fn what_cannot_be_continued_exactly_ends_in_an_error_event() {
    let mut cluster = Cluster::start(&TWO).await;
    let variants = [
        json!({"temperature": 0.7, "seed": 3}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"presence_penalty": 0.5}),
        json!({"stop": ["zzz"]}),
        json!({"min_tokens": 5}),
        json!({"logprobs": true}),
        json!({"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ];
    for variant in variants {
        let mut body = chat(&conversation(&variant.to_string(), 3), 10, true);
        body.as_object_mut()
            .unwrap()
            .extend(variant.as_object().unwrap().clone());
        for engine in &cluster.engines {
            engine.on_decode(Act::CutAfter(4));
        }
        let mut events = cluster.client.stream("/v1/chat/completions", &body).await;
        let (events, done) = events.rest().await;
        let error = &events.last().unwrap()["error"];
        assert!(!done && error["code"] == "worker_lost", "{variant}: {events:?}");
        assert_eq!(text_of(&events).len(), 4, "{variant}");
        assert_eq!(cluster.turn().await.error.as_deref(), Some("worker_lost"), "{variant}");
        for engine in &cluster.engines {
            engine.forget_acts();
        }
    }
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_client_without_a_stream_never_sees_a_break() {
    let cluster = Cluster::start(&TWO).await;
    for (turn, act) in [
        Act::CutAfter(4),
        Act::ErrorAfter(2),
        Act::Refuse(500),
        Act::Refuse(503),
        Act::NoEnd,
        Act::NoMark,
    ]
    .into_iter()
    .enumerate()
    {
        for engine in &cluster.engines {
            engine.forget_acts();
        }
        let messages = conversation(&format!("w{turn}"), 30);
        // Whichever worker gets it: the first try fails.
        for engine in &cluster.engines {
            engine.on_decode(act.clone());
        }
        let body = chat(&messages, 10, false);
        let answer = cluster.client.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200, "{act:?}: {}", answer.text);
        let text = answer.json()["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned();
        assert_eq!(text, answer_to(&tokens_of(&messages), 10), "{act:?}");
    }
    cluster.until_idle().await;
}

#[tokio::test]
async fn an_engine_that_hides_its_tokens_is_not_continued() {
    let cluster = Cluster::start(&[Role::Both]).await;
    cluster.engines[0].keep_tokens_secret();
    cluster.engines[0].on_decode(Act::CutAfter(2));
    let mut events = cluster
        .client
        .stream("/v1/chat/completions", &chat(&messages(5), 5, true))
        .await;
    let (events, done) = events.rest().await;
    assert!(
        !done && events.last().unwrap()["error"]["type"] == "upstream_error",
        "{events:?}"
    );
    cluster.until_idle().await;
}

#[tokio::test]
async fn an_answer_that_lacks_only_its_end_is_whole() {
    for act in [Act::NoEnd, Act::NoMark] {
        let cluster = Cluster::start(&[Role::Both]).await;
        cluster.engines[0].on_decode(act.clone());
        let body = chat(&messages(5), 5, true);
        let mut events = cluster.client.stream("/v1/chat/completions", &body).await;
        let (events, done) = events.rest().await;
        assert!(done, "{act:?}: {events:?}");
        assert_eq!(text_of(&events), answer_to(&tokens_of(&messages(5)), 5), "{act:?}");
        assert_eq!(
            events.last().unwrap()["choices"][0]["finish_reason"],
            "length",
            "{act:?}"
        );
        assert_eq!(
            cluster.engines[0].decodes().len(),
            1,
            "{act:?}: nothing is left to generate"
        );
        cluster.until_idle().await;
    }
}

#[tokio::test]
async fn a_transfer_that_fails_is_tried_again_with_new_parameters() {
    let cluster = Cluster::start(&PD).await;
    cluster.engines[0].on_prefill(Act::NoParams);
    cluster.engines[1].on_decode(Act::Refuse(500));
    let messages = messages(200);
    let answer = cluster
        .client
        .post("/v1/chat/completions", &chat(&messages, 4, false))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(
        answer.json()["choices"][0]["message"]["content"],
        answer_to(&tokens_of(&messages), 4)
    );
    let params: Vec<Value> = cluster.engines[1]
        .decodes()
        .iter()
        .map(|seen| seen.body["kv_transfer_params"].clone())
        .filter(|params| !params.is_null())
        .collect();
    let mut distinct = params.clone();
    distinct.dedup();
    assert_eq!(params, distinct, "no parameters are used twice");
    cluster.until_idle().await;
}

#[tokio::test]
async fn the_engines_own_refusal_is_passed_on() {
    let mut cluster = Cluster::start(&[Role::Both]).await;
    cluster.engines[0].on_decode(Act::Refuse(422));
    let answer = cluster
        .client
        .post("/v1/chat/completions", &chat(&messages(5), 4, true))
        .await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["message"]),
        (422, &json!("scripted"))
    );
    assert_eq!(cluster.turn().await.error.as_deref(), Some("refused"));
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_worker_that_comes_back_is_used_again() {
    let mut cluster = Cluster::start(&[Role::Both]).await;
    let body = chat(&messages(30), 4, false);
    assert_eq!(cluster.client.post("/v1/chat/completions", &body).await.status, 200);
    let epoch = cluster.client.get("/admin/workers").await.json()["data"][0]["epoch"].clone();
    cluster.engines[0].kill().await;
    cluster
        .client
        .until("/admin/workers", "the worker is dead", |page| {
            page["data"][0]["state"] == "dead"
        })
        .await;
    assert_eq!(cluster.client.get("/ready").await.status, 503);
    assert_eq!(cluster.client.get("/health").await.status, 200);
    let answer = cluster.client.post("/v1/chat/completions", &body).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["code"]),
        (503, &json!("no_worker"))
    );
    cluster.engines[0].revive().await;
    cluster
        .client
        .until("/admin/workers", "the worker is back", |page| {
            page["data"][0]["state"] == "degraded"
        })
        .await;
    assert_eq!(cluster.client.get("/ready").await.status, 200);
    let page = cluster.client.get("/admin/workers").await.json();
    assert_ne!(page["data"][0]["epoch"], epoch);
    let answer = cluster.client.post("/v1/chat/completions", &body).await;
    assert_eq!(
        (answer.status.as_u16(), answer.header("x-homing-cached-tokens")),
        (200, Some("0")),
        "nothing is assumed"
    );
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_sick_worker_is_left_alone_until_it_is_well() {
    let cluster = Cluster::start(&TWO).await;
    cluster.engines[0].set_sick(true);
    cluster
        .client
        .until("/admin/workers", "one is dead", |page| {
            page["data"][0]["state"] == "dead"
        })
        .await;
    for turn in 0..4 {
        let body = chat(&conversation(&format!("w{turn}"), 20), 2, false);
        let answer = cluster.client.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.header("x-homing-worker"), Some("w1"), "{}", answer.text);
    }
    cluster.engines[0].set_sick(false);
    cluster
        .client
        .until("/admin/workers", "it is back", |page| {
            page["data"][0]["state"] == "degraded"
        })
        .await;
}

#[tokio::test]
async fn a_stream_goes_on_when_its_worker_hangs() {
    let mut cluster = Cluster::start(&TWO).await;
    for engine in &cluster.engines {
        engine.hold();
        engine.release(3);
    }
    let messages = messages(30);
    let mut events = cluster
        .client
        .stream("/v1/chat/completions", &chat(&messages, 8, true))
        .await;
    let mut seen = Vec::new();
    while text_of(&seen).len() < 3 {
        seen.push(serde_json::from_str::<Value>(&events.next().await.unwrap()).unwrap());
    }
    let (busy, other) = split(&mut cluster);
    cluster.engines[other].release(10);
    // Its connection stands, but it answers no probe any more.
    cluster.engines[busy].set_sick(true);
    let (rest, done) = events.rest().await;
    seen.extend(rest);
    assert!(done, "{seen:?}");
    assert_eq!(text_of(&seen), answer_to(&tokens_of(&messages), 8));
    cluster.engines[busy]
        .until("its leg is cancelled", |engine| engine.open() == 0)
        .await;
    cluster.until_idle().await;
}

/// The text and the error's code of a stream. One that fails before it begins is answered as any other request.
async fn streamed(client: &Caller, body: &Value) -> (String, Value) {
    let response = client
        .send(Method::POST, "/v1/chat/completions", &[], body.to_string())
        .await;
    if !response.status().is_success() {
        return answered(&whole(response).await.json());
    }
    let (events, done) = Events::new(response).rest().await;
    let error = events
        .last()
        .map(|event| event["error"]["code"].clone())
        .unwrap_or_default();
    assert_ne!(done, error.is_string(), "an end or an error: {events:?}");
    (text_of(&events), error)
}

/// The text and the error's code of a whole answer.
fn answered(answer: &Value) -> (String, Value) {
    let text = answer["choices"][0]["message"]["content"].as_str();
    (text.unwrap_or_default().to_owned(), answer["error"]["code"].clone())
}

/// Many clients while workers die and come back: each gets its whole answer, or an error that says what happened.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_the_storm_every_request_ends_once_and_right() {
    const CLIENTS: usize = 160;
    let roles = [Role::Both, Role::Both, Role::Prefill];
    // As many tries as there are deaths and then some: how many of them a request meets is a matter of the machine's speed.
    let mut cluster = Cluster::start_with(&roles, |config| config.router.limits.attempts = 16).await;
    let requests: Vec<_> = (0..CLIENTS)
        .map(|index| {
            let client = cluster.client.clone();
            tokio::spawn(async move {
                let messages = conversation(&format!("w{index}"), 20);
                let body = chat(&messages, 40, index % 2 == 0);
                let (text, error) = if index % 2 == 0 {
                    streamed(&client, &body).await
                } else {
                    answered(&client.post("/v1/chat/completions", &body).await.json())
                };
                let expected = answer_to(&tokens_of(&messages), 40);
                assert!(
                    expected.starts_with(&text),
                    "what was sent is right as far as it goes: {text} {expected}"
                );
                assert!(error.is_string() || text == expected, "{text}");
                error.as_str().map(str::to_owned)
            })
        })
        .collect();
    for round in 0..4 {
        let dies = round % 2;
        let before = cluster.engines[dies].seen().len();
        let more = |engine: &Fake| engine.seen().len() > before + 5 || engine.seen().len() > CLIENTS / 4;
        cluster.engines[dies].until("it is busy", more).await;
        let life = cluster.client.get("/admin/workers").await.json()["data"][dies]["epoch"].clone();
        cluster.engines[dies].revive().await;
        // One at a time: whom the death of one breaks off goes on at the other, which the router must have met again.
        let is_back = |page: &Value| {
            let worker = &page["data"][dies];
            worker["epoch"] != life && worker["state"] == "degraded"
        };
        let met = "its next life is met";
        cluster.client.until("/admin/workers", met, is_back).await;
    }
    let mut errors = Vec::new();
    for request in requests {
        errors.extend(request.await.unwrap());
    }
    assert!(
        errors.len() < CLIENTS / 4,
        "of {CLIENTS} answers these are not whole: {errors:?}"
    );
    cluster.until_idle().await;
    for engine in &cluster.engines {
        engine.until("no request is open", |engine| engine.open() == 0).await;
    }
}
