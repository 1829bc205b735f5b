//! What a worker holds for a puller, and what it is told of that: released, renewed, or nothing that makes sense.

use crate::client::{Answer, Client, PATIENCE, greedy, prompt, start, steps, tiny};
use crate::transfer::{Trio, transfer_failed};
use homing_units::{BootEpoch, Duration};
use homing_wire::metrics_text::names;
use homing_worker::{Limits, WorkerConfig};
use serde_json::{Value, json};
use std::time::Instant;
use tokio::task::JoinHandle;

/// An export that is computed still: a request called `long`, of seconds of modelled prefill.
async fn long_prefill(p: &Client) -> JoinHandle<Answer> {
    let body = greedy(&prompt(1, 400_000), 1, json!({"do_remote_decode": true})).to_string();
    let client = p.clone();
    let asked = async move {
        let named = [("x-request-id", "long")];
        client.send("POST", "/v1/completions", &named, body.into()).await
    };
    let asked = tokio::spawn(asked);
    p.until("it runs", |probe| probe.load.running == 1).await;
    asked
}

/// The release of what a request of this name asked for, said to this life.
async fn release(client: &Client, name: &str, epoch: BootEpoch) -> Answer {
    let body = json!({"request_id": name, "boot_epoch": epoch});
    client.post("/homing/release", &body).await
}

#[tokio::test]
async fn an_export_that_nobody_will_pull_is_released_at_once() {
    let trio = Trio::new(|name| tiny(name, 128)).await;
    let (p, epoch) = (&trio.p, trio.workers[0].info().epoch);
    let prompt = prompt(1, 150);
    let body = greedy(&prompt, 1, json!({"do_remote_decode": true})).to_string();
    let exported = p
        .send("POST", "/v1/completions", &[("x-request-id", "leg-1")], body.into())
        .await;
    let params = exported.json()["kv_transfer_params"].clone();
    assert_eq!(p.probe().await.load.exporting, 1);
    // To another life, and for another request, it says nothing.
    let elsewhere = release(p, "leg-1", BootEpoch(epoch.0 + 1)).await;
    assert_eq!(
        (elsewhere.status.as_u16(), &elsewhere.error()["code"]),
        (404, &json!("other_life"))
    );
    assert_eq!(release(p, "leg-2", epoch).await.json(), json!({"released": false}));
    assert_eq!(p.probe().await.load.exporting, 1, "it is held still");
    assert_eq!(release(p, "leg-1", epoch).await.json(), json!({"released": true}));
    let load = p.probe().await.load;
    assert_eq!(load.exporting, 0);
    assert_eq!(
        load.blocks_free + load.blocks_evictable,
        load.blocks_total,
        "no block is pinned"
    );
    assert_eq!(
        release(p, "leg-1", epoch).await.json(),
        json!({"released": false}),
        "twice is no error"
    );
    let metrics = p.metrics().await;
    assert_eq!(metrics.sum("homing:exports_released_total"), Some(1.0));
    // Whoever pulls it now fails, as from any export that is gone.
    transfer_failed(&trio.d1.complete(&greedy(&prompt, 4, params)).await, "unknown");
    trio.end().await;
}

#[tokio::test]
async fn a_release_gives_up_a_request_that_holds_nothing_yet() {
    let trio = Trio::new(steps).await;
    let (p, epoch) = (&trio.p, trio.workers[0].info().epoch);
    let asked = long_prefill(p).await;
    assert_eq!(release(p, "long", epoch).await.json(), json!({"released": true}));
    let answer = asked.await.expect("it is answered");
    assert_eq!(
        (answer.status.as_u16(), &answer.error()["code"]),
        (503, &json!("aborted"))
    );
    trio.end().await;
}

/// The two take different connections, and a busy machine serves the later one first.
#[tokio::test]
async fn a_release_that_comes_before_its_request_holds_for_it() {
    let trio = Trio::new(|name| tiny(name, 128)).await;
    let (p, epoch) = (&trio.p, trio.workers[0].info().epoch);
    assert_eq!(release(p, "late", epoch).await.json(), json!({"released": false}));
    let body = greedy(&prompt(1, 150), 1, json!({"do_remote_decode": true})).to_string();
    let ask = async |name: &str| {
        p.send(
            "POST",
            "/v1/completions",
            &[("x-request-id", name)],
            body.clone().into(),
        )
        .await
    };
    let answer = ask("late").await;
    assert_eq!(
        (answer.status.as_u16(), &answer.error()["code"]),
        (503, &json!("aborted"))
    );
    assert_eq!(p.probe().await.load.exporting, 0, "nothing is held for it");
    assert_eq!(ask("other").await.status, 200, "it was said of one request");
    assert_eq!(ask("late").await.status, 200, "and once");
    for name in ["other", "late"] {
        assert_eq!(
            release(p, name, epoch).await.json(),
            json!({"released": true}),
            "{name}"
        );
    }
    trio.end().await;
}

/// The renewal of what a request of this name asked for, said to this life.
async fn renew(client: &Client, name: &str, epoch: BootEpoch) -> Answer {
    let body = json!({"request_id": name, "boot_epoch": epoch});
    client.post("/homing/renew", &body).await
}

/// Held, pulled, and gone are told apart: whoever waits for the pull must know which.
#[tokio::test]
async fn a_renewal_says_what_has_become_of_an_export() {
    let trio = Trio::new(|name| tiny(name, 128)).await;
    let (p, epoch) = (&trio.p, trio.workers[0].info().epoch);
    let gone = |answer: &Answer, code: &str| {
        assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (404, &json!(code)));
    };
    gone(&renew(p, "leg", epoch).await, "unknown_export");
    let own = prompt(1, 150);
    let body = greedy(&own, 1, json!({"do_remote_decode": true})).to_string();
    let ask = async || {
        let named = [("x-request-id", "leg")];
        p.send("POST", "/v1/completions", &named, body.clone().into()).await
    };
    let params = ask().await.json()["kv_transfer_params"].clone();
    gone(&renew(p, "leg", BootEpoch(epoch.0 + 1)).await, "other_life");
    let held = renew(p, "leg", epoch).await.json();
    assert_eq!(held["state"], "held");
    let lease = 10 * PATIENCE;
    assert!(
        held["lease_ms"]
            .as_u64()
            .is_some_and(|left| u128::from(left) > lease.as_millis() - 1_000),
        "{held}"
    );
    trio.d1.greedy(&own, 4, params).await;
    assert_eq!(renew(p, "leg", epoch).await.json(), json!({"state": "pulled"}));
    ask().await;
    assert_eq!(
        renew(p, "leg", epoch).await.json()["state"],
        "held",
        "another of that name"
    );
    release(p, "leg", epoch).await;
    p.until_idle().await;
    // The first of that name was pulled: what was given up must not be taken for it.
    gone(&renew(p, "leg", epoch).await, "unknown_export");
    assert_eq!(p.metrics().await.sum("homing:exports_renewed_total"), Some(2.0));
    trio.end().await;
}

/// A lease that nobody lets end, and then one that nobody renews.
#[tokio::test]
async fn a_lease_that_is_renewed_outlasts_itself() {
    let lease = Duration::from_millis(500);
    let config = tiny("p", 128);
    let limits = Limits {
        export_lease: lease,
        export_renewals: u32::MAX,
        ..config.limits.clone()
    };
    let worker = start(WorkerConfig { limits, ..config }).await;
    let (p, epoch) = (Client::of(&worker), worker.info().epoch);
    let body = greedy(&prompt(1, 150), 1, json!({"do_remote_decode": true})).to_string();
    let named = [("x-request-id", "held")];
    assert_eq!(p.send("POST", "/v1/completions", &named, body.into()).await.status, 200);
    let began = Instant::now();
    while began.elapsed() < 2 * lease {
        assert_eq!(renew(&p, "held", epoch).await.json()["state"], "held");
    }
    assert_eq!(p.probe().await.load.exporting, 1, "two leases later it is held still");
    p.until_idle().await;
    assert_eq!(p.metrics().await.sum(names::NIXL_KV_EXPIRED_REQUESTS), Some(1.0));
    assert_eq!(renew(&p, "held", epoch).await.status, 404);
    worker.shutdown().await;
}

#[tokio::test]
async fn a_renewal_of_what_is_computed_still_waits_for_nothing() {
    let trio = Trio::new(steps).await;
    let (p, epoch) = (&trio.p, trio.workers[0].info().epoch);
    let asked = long_prefill(p).await;
    assert_eq!(renew(p, "long", epoch).await.json(), json!({"state": "computing"}));
    release(p, "long", epoch).await;
    assert_eq!(asked.await.expect("it is answered").status, 503);
    trio.end().await;
}

#[tokio::test]
async fn a_release_or_renewal_that_makes_no_sense_is_refused() {
    let trio = Trio::new(|name| tiny(name, 16)).await;
    let check = async |body: Value, status: u16| {
        for path in ["/homing/release", "/homing/renew"] {
            let answer = trio.p.post(path, &body).await;
            assert_eq!(answer.status.as_u16(), status, "{path} {body}: {answer:?}");
            answer.error();
        }
    };
    check(json!({}), 400).await;
    check(json!([]), 400).await;
    check(json!({"request_id": 1, "boot_epoch": 1}), 400).await;
    check(json!({"request_id": "a"}), 400).await;
    check(json!({"request_id": "a", "boot_epoch": -1}), 400).await;
    check(json!({"request_id": "a".repeat(129), "boot_epoch": 1}), 400).await;
    check(json!({"request_id": "a".repeat(2_000), "boot_epoch": 1}), 413).await;
    trio.end().await;
}
