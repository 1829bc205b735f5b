//! KV that goes out and comes in: held until the ack, pulled once, fenced until the driver's word.

use crate::driver::{Driver, small, tokens};
use homing_engine::api::{EngineConfig, FinishReason, ImportError, Input, Reject, Transfer};
use homing_units::{Instant, RequestId};

fn import(tokens: u32) -> Transfer {
    Transfer::Import { tokens }
}

#[test]
fn an_export_is_held_until_it_is_acknowledged() {
    let mut driver = Driver::new(small(10));
    let id = driver.submit(1, &tokens(1, 10), 1, Transfer::Export);
    driver.run();
    assert_eq!(driver.log, ["exported r1", "finished r1 Length"]);
    let held = &driver.exports[&id];
    assert_eq!((held.blocks.len(), held.tokens), (3, 10), "the partial block too");
    assert_eq!(driver.engine.block_table(id), held.blocks);
    assert_eq!(driver.engine.snapshot().exporting, 1);
    assert_eq!(driver.engine.snapshot().blocks_free, 7);
    // Nobody gets the held blocks, however much is wanted.
    driver.submit(2, &tokens(2, 24), 4, Transfer::None);
    driver.run();
    driver.ack(id);
    assert_eq!(driver.log.last().map(String::as_str), Some("export ended r1 Acked"));
    // A second one finds nothing.
    driver.input(Input::ExportAck(id));
    driver.assert_idle();
}

#[test]
fn an_export_ends_with_its_lease_or_with_an_abort() {
    let mut driver = Driver::new(small(10));
    driver.submit(1, &tokens(1, 10), 1, Transfer::Export);
    driver.run();
    let id = driver.submit(2, &tokens(2, 10), 1, Transfer::Export);
    driver.run();
    driver.input(Input::Abort(id));
    assert_eq!(driver.log.last().map(String::as_str), Some("export ended r2 Aborted"));
    driver.advance_to_timeout();
    assert_eq!(
        driver.log.last().map(String::as_str),
        Some("export ended r1 LeaseEnded")
    );
    driver.assert_idle();
}

/// One that is late for a reason, and says so just before each end.
#[test]
fn a_lease_that_is_renewed_ends_later_but_not_for_ever() {
    let config = EngineConfig {
        export_renewals: 3,
        ..small(10)
    };
    let lease = config.export_lease;
    let mut driver = Driver::new(config);
    let id = driver.submit(1, &tokens(1, 10), 1, Transfer::Export);
    driver.run();
    let first = driver.engine.lease_ends(id).expect("it is held");
    let mut ends = first;
    for renewal in 1..=5_u32 {
        driver.now = Instant::from_nanos(ends.as_nanos() - 1);
        driver.input(Input::RenewExport(id));
        let next = driver.engine.lease_ends(id).expect("it is held still");
        let expected = if renewal <= 3 { driver.now + lease } else { ends };
        assert_eq!(next, expected, "renewal {renewal}");
        ends = next;
    }
    assert_eq!(driver.engine.poll_timeout(), Some(ends));
    driver.advance_to_timeout();
    assert_eq!(driver.now, ends, "at last it ends");
    assert_eq!(
        driver.log.last().map(String::as_str),
        Some("export ended r1 LeaseEnded")
    );
    driver.assert_idle();
}

/// What is not held, or not any more at that very moment, is not brought back.
#[test]
fn only_what_is_held_is_renewed() {
    let mut driver = Driver::new(small(20));
    driver.input(Input::RenewExport(RequestId(9)));
    let id = driver.submit(1, &tokens(1, 10), 1, Transfer::Export);
    driver.input(Input::RenewExport(id));
    assert_eq!(driver.engine.lease_ends(id), None, "it is computed still");
    driver.run();
    driver.now = driver.engine.lease_ends(id).expect("it is held");
    driver.input(Input::RenewExport(id));
    assert_eq!(
        driver.log.last().map(String::as_str),
        Some("export ended r1 LeaseEnded"),
        "a renewal in the moment of its end comes too late"
    );
    let acked = driver.submit(2, &tokens(2, 10), 1, Transfer::Export);
    driver.run();
    driver.ack(acked);
    driver.input(Input::RenewExport(acked));
    assert_eq!(driver.engine.lease_ends(acked), None);
    driver.assert_idle();
}

#[test]
fn an_aborted_request_is_not_exported_and_an_output_beyond_the_prompt_is_not_held() {
    let mut driver = Driver::new(small(20));
    let aborted = driver.submit(1, &tokens(1, 10), 3, Transfer::Export);
    driver.input(Input::Abort(aborted));
    driver.run();
    let long = driver.submit(2, &tokens(2, 10), 9, Transfer::Export);
    driver.run();
    assert_eq!(driver.exports[&long].blocks.len(), 3);
    assert_eq!(
        driver.engine.snapshot().blocks_free + driver.engine.snapshot().blocks_evictable,
        17
    );
    driver.ack(long);
    driver.assert_idle();
}

#[test]
fn what_another_worker_computed_is_pulled_and_only_the_rest_is_computed() {
    // Prompt, offer, and what then is pulled and computed.
    let check = |prompt: usize, offer: u32, blocks: usize, imported: u32| {
        let mut driver = Driver::new(small(10));
        let id = driver.submit(1, &tokens(1, prompt), 3, import(offer));
        let what = format!("{offer} of {prompt}");
        assert_eq!(driver.ordered[0].blocks.len(), blocks, "{what}");
        assert!(!driver.has_step() || blocks == 0, "{what}: the KV comes first");
        if blocks > 0 {
            driver.finish_import(id, Ok(()));
        }
        driver.run();
        let usage = driver.end(id).usage;
        assert_eq!(
            (usage.imported_tokens, usage.local_cached_tokens),
            (imported, 0),
            "{what}"
        );
        assert_eq!(driver.engine.snapshot().imported_tokens, u64::from(imported));
        assert_eq!(
            driver.engine.snapshot().computed_tokens,
            prompt as u64 - u64::from(imported)
        );
        assert_eq!(
            driver.cache.len(),
            (prompt + 2) / 4,
            "{what}: whole blocks are cached, pulled or not"
        );
        driver.assert_idle();
    };
    check(10, 10, 3, 9);
    check(10, 9, 3, 9);
    check(10, 8, 2, 8);
    check(10, 5, 2, 5);
    check(8, 8, 2, 7);
    check(9, 9, 2, 8);
    check(1, 1, 0, 0);
    check(10, 0, 0, 0);
}

#[test]
fn an_import_pulls_only_what_is_not_cached_here() {
    let mut driver = Driver::new(small(20));
    driver.submit(1, &tokens(1, 9), 1, Transfer::None);
    driver.run();
    let partly = driver.submit(2, &tokens(1, 18), 1, import(18));
    assert_eq!(driver.log.last().map(String::as_str), Some("import r2 2+3"));
    driver.finish_import(partly, Ok(()));
    driver.run();
    let usage = driver.end(partly).usage;
    assert_eq!((usage.local_cached_tokens, usage.imported_tokens), (8, 9));
    // All on offer is cached: an order without blocks, and the request goes on at once.
    let cached = driver.submit(3, &tokens(1, 18), 1, import(16));
    assert_eq!(driver.log.last().map(String::as_str), Some("import r3 4+0"));
    assert!(driver.has_step());
    // An answer nobody waits for changes nothing.
    driver.input(Input::ImportDone {
        id: cached,
        outcome: Err(ImportError::Unknown),
    });
    driver.run();
    assert_eq!(driver.end(cached).usage.local_cached_tokens, 16);
    assert_eq!(driver.reason(cached), FinishReason::Length);
    driver.assert_idle();
}

#[test]
fn pulled_blocks_are_found_by_the_next_request() {
    let mut driver = Driver::new(small(20));
    let first = driver.submit(1, &tokens(1, 13), 1, import(13));
    driver.finish_import(first, Ok(()));
    assert_eq!(driver.cache.len(), 3, "announced when they arrive");
    let second = driver.submit(2, &tokens(1, 14), 1, Transfer::None);
    driver.run();
    assert_eq!(driver.end(second).usage.local_cached_tokens, 12);
    driver.assert_idle();
}

#[test]
fn a_failed_import_ends_the_request_and_leaks_nothing() {
    let mut driver = Driver::new(small(20));
    let id = driver.submit(1, &tokens(1, 13), 5, import(13));
    driver.finish_import(id, Err(ImportError::Corrupt));
    assert_eq!(driver.reason(id), FinishReason::ImportFailed(ImportError::Corrupt));
    assert_eq!(driver.engine.snapshot().blocks_free, 20);
    assert!(driver.cache.is_empty());
    driver.assert_idle();
}

#[test]
fn blocks_of_an_import_that_was_given_up_are_fenced_until_the_driver_is_done() {
    let give_up = |abort: bool, outcome: Result<(), ImportError>| {
        let mut driver = Driver::new(small(6));
        driver.submit(9, &tokens(1, 4), 1, Transfer::None);
        driver.run();
        let id = driver.submit(1, &tokens(1, 13), 5, import(13));
        let expected = if abort {
            driver.input(Input::Abort(id));
            FinishReason::Aborted
        } else {
            driver.advance_to_timeout();
            FinishReason::ImportFailed(ImportError::TimedOut)
        };
        assert_eq!(driver.reason(id), expected);
        let snapshot = driver.engine.snapshot();
        assert_eq!(
            (snapshot.importing, snapshot.blocks_free, snapshot.blocks_evictable),
            (0, 3, 1)
        );
        assert_eq!(driver.engine.poll_timeout(), None);
        let large = driver.submit(2, &tokens(2, 17), 2, Transfer::None);
        assert!(
            !driver.has_step(),
            "two blocks are behind the fence, and five are wanted"
        );
        driver.finish_import(id, outcome);
        driver.run();
        assert_eq!(driver.reason(large), FinishReason::Length);
        driver.assert_idle();
    };
    give_up(true, Ok(()));
    give_up(true, Err(ImportError::Unreachable));
    give_up(false, Ok(()));
    give_up(false, Err(ImportError::Corrupt));
}

#[test]
fn imports_take_all_of_their_blocks_or_none_in_order_of_arrival() {
    let mut driver = Driver::new(small(8));
    let first = driver.submit(1, &tokens(1, 20), 1, import(20));
    let second = driver.submit(2, &tokens(2, 20), 1, import(20));
    let third = driver.submit(3, &tokens(3, 4), 1, import(4));
    assert_eq!(
        driver.imports.keys().copied().collect::<Vec<_>>(),
        [first],
        "the third waits its turn"
    );
    assert_eq!(driver.engine.snapshot().waiting, 2);
    driver.finish_import(first, Ok(()));
    driver.run();
    assert_eq!(driver.imports.keys().copied().collect::<Vec<_>>(), [second, third]);
    driver.finish_import(third, Ok(()));
    driver.finish_import(second, Ok(()));
    driver.run();
    driver.assert_idle();
}

#[test]
fn an_import_starts_beside_a_running_step_but_takes_no_room_from_older_requests() {
    let mut driver = Driver::new(small(12));
    driver.submit(1, &tokens(1, 16), 4, Transfer::None);
    // It waits for the next step, and needs five blocks.
    driver.submit(2, &tokens(2, 20), 1, Transfer::None);
    let small_one = driver.submit(3, &tokens(3, 6), 1, import(6));
    let large_one = driver.submit(4, &tokens(4, 8), 1, import(8));
    assert!(driver.has_step());
    assert_eq!(driver.imports.keys().copied().collect::<Vec<_>>(), [small_one]);
    driver.finish_import(small_one, Ok(()));
    driver.run();
    driver.finish_import(large_one, Ok(()));
    driver.run();
    assert!(
        !driver.log.iter().any(|line| line.starts_with("preempted")),
        "{:?}",
        driver.log
    );
    driver.assert_idle();
}

#[test]
fn a_preempted_request_does_not_pull_again() {
    let mut driver = Driver::new(small(8));
    driver.submit(1, &tokens(1, 8), 16, Transfer::None);
    let pulled = driver.submit(2, &tokens(2, 8), 16, import(8));
    driver.finish_import(pulled, Ok(()));
    driver.run();
    assert_eq!(driver.ordered.len(), 1);
    let usage = driver.end(pulled).usage;
    assert_eq!(
        (usage.preemptions, usage.imported_tokens, usage.output_tokens),
        (1, 7, 16)
    );
    driver.assert_idle();
}

#[test]
fn importing_requests_count_as_running_and_waiting_ones_as_waiting() {
    let config = EngineConfig {
        max_running: 2,
        max_waiting: 1,
        ..small(40)
    };
    let mut driver = Driver::new(config);
    for id in 1..=4 {
        driver.submit(id, &tokens(u32::try_from(id).unwrap(), 8), 1, import(8));
    }
    let snapshot = driver.engine.snapshot();
    assert_eq!((snapshot.importing, snapshot.running, snapshot.waiting), (2, 0, 1));
    assert_eq!(driver.requests[&RequestId(4)].rejected, Some(Reject::QueueFull));
    driver.finish_import(RequestId(1), Ok(()));
    assert_eq!(driver.imports.len(), 1, "a request that runs keeps its place");
    driver.run();
    assert_eq!(driver.imports.len(), 2);
    for id in [2, 3] {
        driver.finish_import(RequestId(id), Ok(()));
    }
    driver.run();
    driver.assert_idle();
}

#[test]
fn a_request_that_pulled_what_another_computed_meanwhile_can_have_the_whole_pool() {
    let mut driver = Driver::new(small(9));
    driver.submit(1, &tokens(1, 15), 1, Transfer::None);
    // It finds nothing cached yet, so it pulls copies of blocks that the first is about to cache.
    let large = driver.submit(2, &tokens(1, 15), 22, import(14));
    driver.run();
    driver.finish_import(large, Ok(()));
    driver.run();
    assert_eq!(driver.reason(large), FinishReason::Length);
    driver.assert_idle();
}

#[test]
fn a_small_request_does_not_overtake_an_older_import() {
    let mut driver = Driver::new(small(8));
    driver.submit(1, &tokens(1, 14), 6, Transfer::None);
    let large = driver.submit(2, &tokens(2, 24), 1, import(24));
    let little = driver.submit(3, &tokens(3, 3), 1, Transfer::None);
    while driver.imports.is_empty() {
        assert!(
            driver.requests[&little].end.is_none(),
            "it waits behind the import, which waits for blocks"
        );
        assert!(driver.run_step());
    }
    assert_eq!(driver.imports.keys().copied().collect::<Vec<_>>(), [large]);
    driver.run();
    assert!(
        driver.requests[&little].end.is_some(),
        "there is room beside the import"
    );
    driver.finish_import(large, Ok(()));
    driver.run();
    driver.assert_idle();
}
