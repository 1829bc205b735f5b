//! Continuous batching, chunked prefill, prefix reuse, preemption, admission, aborts.

use crate::driver::{Driver, small, tokens};
use homing_engine::api::{FinishReason, Input, Reject, StepItem, Transfer, Usage};
use homing_units::RequestId;

/// A step's items as `id:start+count`, with `*` where a token is sampled and `d` for a decode.
fn items(driver: &Driver) -> String {
    let text = |item: &StepItem| {
        let sample = if item.sample { "*" } else { "" };
        let decode = if item.decode { "d" } else { "" };
        format!("{}:{}+{}{sample}{decode}", item.id.0, item.start, item.count)
    };
    driver.step().items.iter().map(text).collect::<Vec<_>>().join(" ")
}

fn usage(driver: &Driver, id: RequestId) -> Usage {
    driver.end(id).usage
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
