//! Clients of streams that wait for long: they see that their request lives, and nothing of it counts as an answer.

use crate::support::engine::{Act, PATIENCE, answer_to};
use crate::support::{Cluster, Events, chat, conversation, messages, text_of, tokens_of};
use homing_router::event::Role;
use http::Method;
use http_body_util::BodyExt;
use std::time::Duration;

async fn quick_to_show(roles: &[Role]) -> Cluster {
    Cluster::start_with(roles, |config| {
        config.clocks.keep_alive = Duration::from_millis(20);
        config.router.limits.requests_per_worker = 1;
    })
    .await
}

/// The first bytes of a stream whose engine says nothing, and the rest once it speaks.
async fn waited(path: &str, expected: &str) {
    let cluster = quick_to_show(&[Role::Both]).await;
    cluster.engines[0].hold();
    // Somebody else has the only place.
    let body = chat(&conversation("other", 9), 2, true);
    let mut other = cluster.client.stream("/v1/chat/completions", &body).await;
    let messages = messages(20);
    let body = chat(&messages, 4, true).to_string();
    let mut response = cluster.client.send(Method::POST, path, &[], body).await;
    assert_eq!(response.status(), 200, "{path}");
    let first = response.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(first, expected, "{path}");
    cluster.engines[0].release(6);
    assert!(other.rest().await.1);
    let mut events = Events::new(response);
    let mut text = String::new();
    while let Some(data) = events.next().await {
        text.push_str(&data);
    }
    for letter in answer_to(&tokens_of(&messages), 4).chars() {
        assert!(text.contains(&format!("\"{letter}\"")), "{path}: {letter} in {text}");
    }
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_client_that_waits_for_long_sees_that_its_request_lives() {
    waited("/v1/chat/completions", ": waiting\n\n").await;
    waited("/v1/messages", "event: ping\ndata: {\"type\": \"ping\"}\n\n").await;
}

/// The engine that has the request. A sign of life may be there before it: the client is shown one while the request is
/// still on its way, too.
async fn until_one_is_busy(cluster: &Cluster) -> usize {
    let looking = async {
        loop {
            match cluster.engines.iter().position(|engine| engine.open() > 0) {
                Some(busy) => return busy,
                None => tokio::task::yield_now().await,
            }
        }
    };
    let found = tokio::time::timeout(PATIENCE, looking).await;
    found.expect("an engine gets the request")
}

/// An answer of which only signs of life were sent begins anew elsewhere, whole.
#[tokio::test]
async fn a_sign_of_life_is_no_part_of_an_answer() {
    let mut cluster = quick_to_show(&[Role::Both, Role::Both]).await;
    cluster.engines.iter().for_each(|engine| engine.on_decode(Act::Hang));
    let messages = messages(20);
    let body = chat(&messages, 4, true).to_string();
    let mut response = cluster
        .client
        .send(Method::POST, "/v1/chat/completions", &[], body)
        .await;
    let first = response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(first.into_data().unwrap(), ": waiting\n\n");
    let busy = until_one_is_busy(&cluster).await;
    cluster.engines[1 - busy].forget_acts();
    cluster.engines[busy].kill().await;
    let (events, is_whole) = Events::new(response).rest().await;
    assert!(is_whole);
    assert_eq!(text_of(&events), answer_to(&tokens_of(&messages), 4));
    assert_eq!(cluster.turn().await.replans, 1);
}
