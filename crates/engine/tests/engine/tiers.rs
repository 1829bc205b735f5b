//! What is evicted comes back from host memory, and what has moved away goes first.

use crate::driver::{Driver, small, tokens};
use homing_engine::api::{EngineConfig, EngineKind, FinishReason, Input, KvChange, SlotConfig, Transfer};
use homing_kv::{Tier, hash_blocks};
use homing_units::RequestId;

fn tiered(kv_blocks: u32, host_blocks: u32) -> Driver {
    Driver::new(EngineConfig {
        host_blocks,
        ..small(kv_blocks)
    })
}

/// A prompt of 33 tokens, whose 8 whole blocks are cached when it ends.
fn serve(driver: &mut Driver, id: u64, content: u32) -> RequestId {
    let id = driver.submit(id, &tokens(content, 33), 1, Transfer::None);
    driver.run();
    id
}

#[test]
fn what_was_evicted_is_copied_back_instead_of_computed() {
    let mut driver = tiered(10, 20);
    serve(&mut driver, 1, 1);
    serve(&mut driver, 2, 2);
    let snapshot = driver.engine.snapshot();
    assert_eq!(
        (snapshot.host_blocks_used, snapshot.host_blocks_total),
        (7, 20),
        "nine blocks were wanted, two were free"
    );
    let again = driver.submit(3, &tokens(1, 33), 1, Transfer::None);
    assert_eq!(driver.log.last().map(String::as_str), Some("reload r3 1+7"));
    assert!(!driver.has_step());
    assert_eq!(driver.engine.snapshot().reloading, 1);
    assert_eq!(driver.engine.snapshot().prefill_tokens_pending, 1);
    driver.finish_reload(again);
    driver.run();
    let usage = driver.end(again).usage;
    assert_eq!((usage.local_cached_tokens, usage.host_cached_tokens), (4, 28));
    assert_eq!(driver.engine.snapshot().computed_tokens, 33 + 33 + 1);
    assert_eq!(driver.engine.snapshot().host_hit_tokens, 28);
    driver.assert_idle();
}

#[test]
fn blocks_are_announced_in_host_memory_before_they_leave_the_pool_and_as_chains() {
    // The second prompt is one chunk, so all that it evicts goes at once.
    let mut driver = Driver::new(EngineConfig {
        host_blocks: 20,
        max_batch_tokens: 64,
        ..small(10)
    });
    serve(&mut driver, 1, 1);
    serve(&mut driver, 2, 2);
    let names = hash_blocks(&tokens(1, 33), 4);
    let mut evicted = names[1..].to_vec();
    let at = driver.events.iter().position(|event| {
        event.change
            == KvChange::Stored {
                request: RequestId(2),
                first_block: 1,
                parent: Some(names[0]),
                hashes: names[1..].to_vec(),
                tier: Tier::Host,
            }
    });
    evicted.reverse();
    assert_eq!(
        driver.events[at.expect("one chain of blocks") + 1].change,
        KvChange::Removed {
            hashes: evicted,
            tier: Tier::Gpu
        }
    );
}

#[test]
fn the_host_tier_is_bounded_and_keeps_the_heads_of_what_was_evicted_last() {
    let mut driver = tiered(10, 5);
    serve(&mut driver, 1, 1);
    serve(&mut driver, 2, 2);
    assert_eq!(driver.engine.snapshot().host_blocks_used, 5);
    let again = driver.submit(3, &tokens(1, 33), 1, Transfer::None);
    assert_eq!(driver.log.last().map(String::as_str), Some("reload r3 1+5"));
    driver.finish_reload(again);
    driver.run();
    assert_eq!(driver.end(again).usage.host_cached_tokens, 20);
    // What is evicted while all of the tier is being copied is lost.
    let third = driver.submit(4, &tokens(2, 33), 1, Transfer::None);
    if driver.reloads.contains_key(&third) {
        driver.finish_reload(third);
    }
    driver.run();
    assert_eq!(driver.reason(third), FinishReason::Length);
    driver.input(Input::ClearCache);
    assert_eq!((driver.cache.len(), driver.host.len()), (0, 0));
    driver.assert_idle();
}

#[test]
fn a_reload_starts_beside_a_step_and_holds_nobody_up() {
    let mut driver = tiered(30, 40);
    for content in 1..=4 {
        serve(&mut driver, u64::from(content), content);
    }
    let runs = driver.submit(10, &tokens(10, 20), 8, Transfer::None);
    driver.run_step();
    let reloads = driver.submit(11, &tokens(1, 33), 1, Transfer::None);
    assert!(driver.has_step() && driver.reloads.contains_key(&reloads));
    let other = driver.submit(12, &tokens(12, 5), 1, Transfer::None);
    driver.run();
    for id in [runs, other] {
        assert_eq!(driver.reason(id), FinishReason::Length, "`{id}` went on");
    }
    driver.finish_reload(reloads);
    driver.run();
    driver.assert_idle();
}

#[test]
fn an_import_pulls_only_what_is_in_neither_tier() {
    let mut driver = tiered(12, 20);
    serve(&mut driver, 1, 1);
    serve(&mut driver, 2, 2);
    let id = driver.submit(3, &tokens(1, 45), 1, Transfer::Import { tokens: 45 });
    assert_eq!(driver.log.last().map(String::as_str), Some("reload r3 3+5"));
    assert!(driver.imports.is_empty(), "one after the other");
    driver.finish_reload(id);
    assert_eq!(driver.log.last().map(String::as_str), Some("import r3 8+3"));
    driver.finish_import(id, Ok(()));
    driver.run();
    let usage = driver.end(id).usage;
    let sources = (
        usage.local_cached_tokens,
        usage.host_cached_tokens,
        usage.imported_tokens,
    );
    assert_eq!(sources, (12, 20, 12));
    // All of the offer is here: the source may release it, and nothing is pulled.
    let mut driver = tiered(12, 20);
    serve(&mut driver, 1, 1);
    serve(&mut driver, 2, 2);
    let id = driver.submit(3, &tokens(1, 33), 1, Transfer::Import { tokens: 20 });
    driver.finish_reload(id);
    assert_eq!(driver.ordered[0].blocks, []);
    driver.run();
    assert_eq!(driver.end(id).usage.imported_tokens, 0);
    driver.assert_idle();
}

#[test]
fn blocks_of_a_reload_that_was_given_up_are_fenced_until_the_driver_is_done() {
    let mut driver = tiered(12, 20);
    serve(&mut driver, 1, 1);
    serve(&mut driver, 2, 2);
    let id = driver.submit(3, &tokens(1, 45), 1, Transfer::Import { tokens: 45 });
    driver.input(Input::Abort(id));
    assert_eq!(driver.reason(id), FinishReason::Aborted);
    let snapshot = driver.engine.snapshot();
    let held = snapshot.blocks_total - snapshot.blocks_free - snapshot.blocks_evictable;
    assert_eq!(
        (snapshot.reloading, held),
        (0, 5),
        "those that the driver may write into"
    );
    // An answer to something else frees nothing.
    driver.input(Input::ImportDone { id, outcome: Ok(()) });
    assert!(driver.engine.snapshot().blocks_free + driver.engine.snapshot().blocks_evictable < 12);
    driver.finish_reload(id);
    driver.assert_idle();
}

#[test]
fn a_released_export_goes_first_but_not_on_vllm() {
    let check = |kind: EngineKind, release: bool, expected: [u32; 2]| {
        let mut driver = Driver::new(EngineConfig { kind, ..small(20) });
        serve(&mut driver, 1, 1);
        let moved = driver.submit(2, &tokens(2, 33), 1, Transfer::Export);
        driver.run();
        if release {
            driver.input(Input::ReleaseExported(moved));
        } else {
            driver.ack(moved);
        }
        // Seven blocks more than are free.
        driver.submit(3, &tokens(3, 43), 1, Transfer::None);
        driver.run();
        let left = [1, 2].map(|content| driver.engine.cached_prefix(&hash_blocks(&tokens(content, 33), 4)));
        assert_eq!(
            left,
            expected.map(|blocks| blocks as usize),
            "{kind:?}, released: {release}"
        );
        driver.input(Input::ReleaseExported(moved));
        driver.assert_idle();
    };
    check(EngineKind::Block, true, [8, 1]);
    check(EngineKind::Block, false, [1, 8]);
    check(EngineKind::Vllm, true, [1, 8]);
    check(EngineKind::Vllm, false, [1, 8]);
}

#[test]
fn what_session_slots_drop_is_gone() {
    let mut driver = Driver::new(EngineConfig {
        kind: EngineKind::SessionSlot(SlotConfig::default()),
        host_blocks: 20,
        ..small(10)
    });
    serve(&mut driver, 1, 1);
    serve(&mut driver, 2, 2);
    let snapshot = driver.engine.snapshot();
    assert_eq!((snapshot.host_blocks_total, snapshot.blocks_free), (0, 10));
}
