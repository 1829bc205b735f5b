//! Continuous batching, chunked prefill, prefix reuse, preemption, admission, aborts.

use crate::driver::{Driver, STEP, small, tokens};
use homing_engine::api::{EngineConfig, FinishReason, Input, KvChange, Reject, Sampled, StepItem, Submit, Transfer};
use homing_kv::{BlockHash, Prompt, Tier, hash_blocks};
use homing_units::{Instant, RequestId};

/// A step's items as `id:start+count`, with `*` where a token is sampled and `d` for a decode.
fn items(driver: &Driver) -> String {
    let text = |item: &StepItem| {
        let sample = if item.sample { "*" } else { "" };
        let decode = if item.decode { "d" } else { "" };
        format!("{}:{}+{}{sample}{decode}", item.id.0, item.start, item.count)
    };
    driver.step().items.iter().map(text).collect::<Vec<_>>().join(" ")
}

/// A prompt that goes on where this request ended, `own` tokens further.
fn next_turn(driver: &Driver, id: RequestId, own: usize) -> Vec<u32> {
    let mut prompt = driver.requests[&id].tokens.clone();
    prompt.extend(tokens(900, own));
    prompt
}

#[test]
fn a_prompt_is_prefilled_in_chunks_and_then_decoded() {
    let mut driver = Driver::new(small(20));
    let id = driver.submit(1, &tokens(1, 37), 3, Transfer::None);
    let mut seen = vec![items(&driver)];
    while driver.run_step() && driver.has_step() {
        seen.push(items(&driver));
    }
    assert_eq!(seen, ["1:0+16", "1:16+16", "1:32+5*", "1:37+1*d", "1:38+1*d"]);
    assert_eq!(driver.reason(id), FinishReason::Length);
    assert_eq!(
        driver.cache.len(),
        9,
        "the whole blocks of 39 computed tokens, 37 of the prompt and 2 of the output"
    );
    driver.assert_idle();
}

#[test]
fn decodes_go_before_prefills_and_new_requests_fill_the_rest() {
    let mut driver = Driver::new(small(40));
    driver.submit(1, &tokens(1, 5), 8, Transfer::None);
    assert_eq!(items(&driver), "1:0+5*");
    driver.submit(2, &tokens(2, 20), 8, Transfer::None);
    driver.submit(3, &tokens(3, 6), 8, Transfer::None);
    driver.run_step();
    assert_eq!(items(&driver), "1:5+1*d 2:0+15");
    driver.run_step();
    assert_eq!(items(&driver), "1:6+1*d 2:15+5* 3:0+6*");
    driver.run();
    driver.assert_idle();
}

#[test]
fn inputs_that_arrive_together_are_planned_together() {
    let mut driver = Driver::new(small(40));
    let submit = |id: u64| {
        Input::Submit(Submit {
            id: RequestId(id),
            prompt: Prompt::of_tokens(&tokens(u32::try_from(id).unwrap(), 5), 4),
            max_output_tokens: 1,
            transfer: Transfer::None,
            session: None,
            owner: None,
        })
    };
    for id in 1..=3 {
        driver.engine.handle(Instant::ZERO, submit(id));
    }
    let planned = std::iter::from_fn(|| driver.engine.poll_output()).count();
    assert_eq!(planned, 1, "one step for all of them");
    assert_eq!(driver.engine.snapshot().running, 3);
}

#[test]
fn the_next_turn_finds_prompt_and_output_but_the_last_token_is_computed() {
    let mut driver = Driver::new(small(40));
    let first = driver.submit(1, &tokens(1, 10), 7, Transfer::None);
    driver.run();
    // 16 of its 17 tokens were computed: 4 whole blocks.
    let second = driver.submit(2, &next_turn(&driver, first, 4), 1, Transfer::None);
    driver.run();
    assert_eq!(driver.end(second).usage.local_cached_tokens, 16);
    // The very same prompt again: all but its last block, for the next token is sampled from its last one.
    let prompt = driver.requests[&second].tokens[..20].to_vec();
    let third = driver.submit(3, &prompt, 1, Transfer::None);
    assert_eq!(items(&driver), "3:16+4*");
    driver.run();
    assert_eq!(driver.end(third).usage.local_cached_tokens, 16);
    let snapshot = driver.engine.snapshot();
    assert_eq!(
        (snapshot.cache_query_tokens, snapshot.cache_hit_tokens),
        (10 + 21 + 20, 32)
    );
    assert_eq!(snapshot.computed_tokens, 10 + 5 + 4);
    driver.assert_idle();
}

#[test]
fn a_prompt_that_two_requests_compute_at_once_is_kept_once() {
    let mut driver = Driver::new(small(40));
    driver.submit(1, &tokens(1, 8), 20, Transfer::None);
    driver.run_step();
    // The second is admitted before the first chunk of the third is cached; both compute the same tokens.
    driver.submit(2, &tokens(2, 13), 3, Transfer::None);
    driver.submit(3, &tokens(2, 13), 3, Transfer::None);
    driver.run_step();
    driver.run_step();
    let (second, third) = (RequestId(2), RequestId(3));
    driver.run_step();
    let tables = [second, third].map(|id| driver.engine.block_table(id).to_vec());
    assert_eq!(
        tables[0][..3],
        tables[1][..3],
        "both use the copy that was cached first"
    );
    assert_ne!(tables[0][3], tables[1][3], "the partial block is each one's own");
    driver.run();
    driver.assert_idle();
}

#[test]
fn the_youngest_is_preempted_and_goes_on_where_it_was() {
    let mut driver = Driver::new(small(8));
    let old = driver.submit(1, &tokens(1, 8), 16, Transfer::None);
    let young = driver.submit(2, &tokens(2, 8), 16, Transfer::None);
    let next = driver.submit(3, &tokens(3, 16), 2, Transfer::None);
    driver.run();
    assert_eq!(
        driver.log,
        [
            "preempted r2",
            "finished r1 Length",
            "finished r2 Length",
            "finished r3 Length"
        ],
        "the preempted one is served before those that waited behind it"
    );
    assert_eq!(
        (driver.end(old).usage.preemptions, driver.end(young).usage.preemptions),
        (0, 1)
    );
    assert_eq!(driver.end(young).usage.output_tokens, 16);
    assert_eq!(driver.end(next).usage.preemptions, 0);
    assert_eq!(driver.engine.snapshot().preemptions, 1);
    // What it computed again is counted once.
    assert_eq!(driver.engine.snapshot().computed_tokens, 8 + 8 + 16);
    driver.assert_idle();
}

#[test]
fn a_preempted_request_finds_what_is_left_of_its_kv() {
    let mut driver = Driver::new(small(12));
    driver.submit(1, &tokens(1, 4), 28, Transfer::None);
    driver.submit(2, &tokens(2, 10), 20, Transfer::None);
    driver.run();
    assert_eq!(driver.log, ["preempted r2", "finished r1 Length", "finished r2 Length"]);
    let of_second = driver
        .steps
        .iter()
        .flat_map(|step| &step.items)
        .filter(|item| item.id == RequestId(2));
    let resumed = of_second.filter(|item| item.start > 10).find(|item| item.count > 1);
    let resumed = resumed.expect("it starts behind what is cached");
    assert!(resumed.start.is_multiple_of(4) && resumed.sample, "{resumed:?}");
    driver.assert_idle();
}

#[test]
fn a_request_that_fits_alone_ends_whatever_else_runs() {
    // 32 tokens have KV at the end: the whole pool.
    let check = |stranger: usize| {
        let mut driver = Driver::new(small(8));
        driver.submit(1, &tokens(1, 8), 8, Transfer::None);
        let large = driver.submit(
            2,
            &tokens(2, stranger),
            u32::try_from(33 - stranger).unwrap(),
            Transfer::None,
        );
        driver.submit(3, &tokens(2, stranger), 4, Transfer::None);
        driver.run();
        assert_eq!(driver.reason(large), FinishReason::Length, "prompt of {stranger}");
        driver.assert_idle();
    };
    [1, 4, 7, 8, 9, 20, 32].into_iter().for_each(check);
}

#[test]
fn a_new_request_waits_until_the_pool_has_room_for_all_of_its_prompt() {
    let mut driver = Driver::new(small(10));
    driver.submit(1, &tokens(1, 24), 2, Transfer::None);
    driver.submit(2, &tokens(2, 16), 1, Transfer::None);
    assert_eq!(items(&driver), "1:0+16", "no budget is left");
    driver.run_step();
    assert_eq!(
        items(&driver),
        "1:16+8*",
        "6 blocks are promised to 1 and one for its growth; 2 needs 4"
    );
    driver.run();
    assert_eq!(
        driver.log,
        ["finished r1 Length", "finished r2 Length"],
        "nobody was preempted"
    );
    driver.assert_idle();
}

#[test]
fn no_more_run_than_may_and_no_more_wait_than_may() {
    let config = EngineConfig {
        max_running: 2,
        max_waiting: 1,
        ..small(40)
    };
    let mut driver = Driver::new(config);
    for id in 1..=4 {
        driver.submit(id, &tokens(1, 3), 20, Transfer::None);
        // While no step is outstanding a new request starts at once.
        driver.run_step();
    }
    let snapshot = driver.engine.snapshot();
    assert_eq!((snapshot.running, snapshot.waiting), (2, 1));
    assert_eq!(driver.requests[&RequestId(4)].rejected, Some(Reject::QueueFull));
    driver.run();
    driver.assert_idle();
}

#[test]
fn what_cannot_be_served_is_rejected() {
    let mut driver = Driver::new(small(8));
    let mut next = 0;
    let mut check = |prompt: usize, output: u32, transfer: Transfer, expected: Option<Reject>| {
        next += 1;
        let id = driver.submit(next, &tokens(1, prompt), output, transfer);
        assert_eq!(
            driver.requests[&id].rejected, expected,
            "{prompt} in, {output} out, {transfer:?}"
        );
        driver.run();
    };
    check(0, 1, Transfer::None, Some(Reject::Invalid));
    check(1, 0, Transfer::None, Some(Reject::Invalid));
    check(4, 1, Transfer::Import { tokens: 5 }, Some(Reject::Invalid));
    check(399, 2, Transfer::None, Some(Reject::ContextTooLong));
    check(399, u32::MAX, Transfer::None, Some(Reject::ContextTooLong));
    check(30, 4, Transfer::None, Some(Reject::PoolTooSmall));
    // The last token's KV is never computed.
    check(30, 3, Transfer::None, None);
    driver.assert_idle();
}

#[test]
fn an_id_in_use_or_a_wrong_number_of_hashes_is_invalid() {
    let mut driver = Driver::new(small(8));
    driver.submit(1, &tokens(1, 4), 4, Transfer::None);
    let submit = |id: u64, hashes: usize| {
        Input::Submit(Submit {
            id: RequestId(id),
            prompt: Prompt {
                blocks: hash_blocks(&tokens(1, 4 * hashes), 4).into(),
                tokens: 9,
            },
            max_output_tokens: 1,
            transfer: Transfer::None,
            session: None,
            owner: None,
        })
    };
    for (id, hashes) in [(1, 2), (2, 1), (2, 3)] {
        driver.engine.handle(driver.now, submit(id, hashes));
        let output = driver.engine.poll_output().expect("an answer");
        let rejected = homing_engine::api::Output::Rejected {
            id: RequestId(id),
            reason: Reject::Invalid,
        };
        assert_eq!(output, rejected);
    }
    driver.run();
    assert_eq!(driver.reason(RequestId(1)), FinishReason::Length);
}

#[test]
fn an_abort_ends_a_request_at_once_and_frees_its_blocks_when_its_step_is_done() {
    let mut driver = Driver::new(small(20));
    let running = driver.submit(1, &tokens(1, 7), 9, Transfer::None);
    let waiting = driver.submit(2, &tokens(2, 7), 9, Transfer::None);
    driver.input(Input::Abort(waiting));
    driver.input(Input::Abort(running));
    assert_eq!(driver.log, ["finished r2 Aborted", "finished r1 Aborted"]);
    assert_eq!(
        driver.engine.snapshot().blocks_free,
        18,
        "the step still writes into two blocks"
    );
    assert_eq!(driver.engine.block_table(running).len(), 2);
    // Once more changes nothing, nor does one of somebody unknown.
    driver.input(Input::Abort(running));
    driver.input(Input::Abort(RequestId(77)));
    // Its sample is ignored.
    driver.now += STEP;
    driver.run_step();
    assert_eq!(driver.engine.snapshot().output_tokens, 0);
    assert_eq!(driver.engine.snapshot().blocks_free, 20);
    driver.assert_idle();
}

#[test]
fn answers_that_are_missing_late_or_double_harm_nobody() {
    let mut driver = Driver::new(small(20));
    let sampled = |id: u64| Sampled {
        id: RequestId(id),
        stop: false,
        filled: None,
    };
    driver.input(Input::StepDone(vec![sampled(1)]));
    driver.submit(1, &tokens(1, 5), 3, Transfer::None);
    driver.submit(2, &tokens(2, 5), 3, Transfer::None);
    driver.run_step();
    assert_eq!(items(&driver), "1:5+1*d 2:0+5*");
    driver.run_step_without(|id| id == RequestId(2));
    assert_eq!(items(&driver), "1:6+1*d 2:0+5*", "what was not run is planned again");
    driver.run();
    assert_eq!(driver.end(RequestId(2)).usage.output_tokens, 3);

    let mut double = Driver::new(small(20));
    double.submit(1, &tokens(1, 5), 3, Transfer::None);
    double
        .engine
        .handle(double.now, Input::StepDone(vec![sampled(1), sampled(1), sampled(9)]));
    double.engine.check_invariants();
    assert_eq!(double.engine.snapshot().output_tokens, 1);
}

#[test]
fn a_block_without_a_name_and_those_after_it_are_not_cached() {
    let mut driver = Driver::new(small(20));
    driver.submit(1, &tokens(1, 6), 14, Transfer::None);
    for step in 0_u32..14 {
        let length = 7 + step;
        let name = (length % 4 == 0 && length > 8).then_some(BlockHash(u128::from(length)));
        let answer = Sampled {
            id: RequestId(1),
            stop: false,
            filled: name,
        };
        driver.engine.handle(driver.now, Input::StepDone(vec![answer]));
        driver.engine.check_invariants();
        while driver.engine.poll_output().is_some() {}
    }
    // The driver did not name block 1, so no chain leads to the blocks after it.
    assert_eq!(driver.engine.cached_blocks(), 1);
    assert_eq!(driver.engine.snapshot().running, 0);
}

#[test]
fn the_output_ends_by_itself_or_at_its_length() {
    let mut driver = Driver::new(small(20));
    let stopped = driver.submit_stopping(1, &tokens(1, 5), 9, 4, Transfer::None);
    let full = driver.submit(2, &tokens(2, 5), 9, Transfer::None);
    // Both at once: the driver's word counts.
    let both = driver.submit_stopping(3, &tokens(3, 5), 2, 2, Transfer::None);
    driver.run();
    assert_eq!(driver.reason(stopped), FinishReason::Stop);
    assert_eq!(driver.reason(full), FinishReason::Length);
    assert_eq!(driver.reason(both), FinishReason::Stop);
    assert_eq!(driver.end(stopped).usage.output_tokens, 4);
}

#[test]
fn events_tell_what_is_evicted_before_what_takes_its_place() {
    let mut driver = Driver::new(small(4));
    assert!(driver.events.is_empty(), "nothing is said of an empty cache");
    driver.submit(1, &tokens(1, 12), 1, Transfer::None);
    driver.run();
    let first = hash_blocks(&tokens(1, 12), 4);
    driver.submit(2, &tokens(2, 8), 1, Transfer::None);
    driver.run();
    let changes: Vec<KvChange> = driver.events.iter().map(|event| event.change.clone()).collect();
    let stored = |request, hashes: Vec<BlockHash>| KvChange::Stored {
        request: RequestId(request),
        first_block: 0,
        parent: None,
        hashes,
        tier: Tier::Gpu,
    };
    let removed = KvChange::Removed {
        hashes: vec![first[2]],
        tier: Tier::Gpu,
    };
    let second = hash_blocks(&tokens(2, 8), 4);
    assert_eq!(changes, [stored(1, first.clone()), removed, stored(2, second)]);
    let snapshot = driver.engine.snapshot();
    assert_eq!((snapshot.evictions, snapshot.evicted_blocks), (1, 1));
}

#[test]
fn clearing_the_cache_spares_what_is_in_use() {
    let mut driver = Driver::new(small(20));
    driver.input(Input::ClearCache);
    assert!(driver.events.is_empty(), "an empty cache is not cleared");
    driver.submit(1, &tokens(1, 8), 1, Transfer::None);
    driver.run();
    driver.submit(2, &tokens(2, 8), 4, Transfer::None);
    driver.run_step();
    driver.input(Input::ClearCache);
    let removed = KvChange::Removed {
        hashes: hash_blocks(&tokens(1, 8), 4).into_iter().rev().collect(),
        tier: Tier::Gpu,
    };
    assert_eq!(driver.events.last().map(|event| &event.change), Some(&removed));
    driver.run();
    driver.input(Input::ClearCache);
    assert_eq!(
        driver.events.last().map(|event| &event.change),
        Some(&KvChange::Cleared)
    );
    assert_eq!(driver.engine.cached_blocks(), 0);
    driver.assert_idle();
}

#[test]
fn a_snapshot_says_what_is_to_be_done() {
    let mut driver = Driver::new(small(30));
    driver.submit(1, &tokens(1, 6), 9, Transfer::None);
    driver.run_step();
    driver.submit(2, &tokens(2, 20), 1, Transfer::None);
    driver.submit(3, &tokens(3, 10), 1, Transfer::Import { tokens: 8 });
    driver.run_step();
    let snapshot = driver.engine.snapshot();
    assert_eq!((snapshot.running, snapshot.waiting, snapshot.importing), (2, 0, 1));
    assert_eq!(
        snapshot.decode_context_tokens, 8,
        "six of the prompt and two of the output"
    );
    assert_eq!(
        snapshot.prefill_tokens_pending,
        20 + 2,
        "what will be pulled is not prefilled here"
    );
    assert_eq!(snapshot.blocks_total, 30);
}
