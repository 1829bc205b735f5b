//! Sessions as they are recorded, and as they come out.

use crate::formats::{ReadOptions, read_trace, read_trace_with};
use crate::trace::{Trace, TurnRef};
use homing_units::Duration;

fn read(lines: &str) -> Trace {
    let trace = read_trace("test", lines.as_bytes()).expect("a good trace");
    trace.check_invariants();
    trace
}

/// A line of one session with these requests, blocks of 4 tokens.
fn line(id: &str, requests: &[&str]) -> String {
    let requests = requests.join(", ");
    format!(
        r#"{{"id": "{id}", "block_size": 4, "hash_id_scope": "local", "tool_tokens": 3, "requests": [{requests}]}}"#
    )
}

fn check_error(requests: &[&str], expected: &str) {
    let error = read_trace("test", line("a", requests).as_bytes()).expect_err("a broken session");
    assert_eq!(error.to_string(), expected, "for {requests:?}");
}

fn check_turns(requests: &[&str], expected: &[(u32, &[u32], u64)]) {
    let trace = read(&line("a", requests));
    let seen: Vec<(u32, &[u32], u64)> = trace.sessions[0]
        .turns
        .iter()
        .map(|turn| (turn.agent, turn.after.as_slice(), turn.gap.as_secs()))
        .collect();
    assert_eq!(seen, expected, "(agent, after, gap) for {requests:?}");
}

const FIRST: &str = r#"{"t": 0, "type": "s", "in": 9, "out": 3, "hash_ids": [1, 2], "api_time": 10, "think_time": 0}"#;

#[test]
fn a_turn_follows_the_one_before_after_its_gap() {
    let given = r#"{"t": 31, "type": "n", "in": 9, "out": 1, "hash_ids": [1, 2], "api_time": 4, "think_time": 20}"#;
    let derived = r#"{"t": 40, "type": "n", "in": 9, "out": 1, "hash_ids": [1, 2], "api_time": 4}"#;
    check_turns(&[FIRST, given, derived], &[(0, &[], 0), (0, &[0], 20), (0, &[1], 5)]);
}

#[test]
fn after_an_unknown_service_time_the_gap_comes_from_the_recorded_times() {
    // 10 s for 3 tokens elsewhere: 6 tokens take 20 s, so the request at 30 s ended at 50 s.
    let unknown = r#"{"t": 30, "type": "s", "in": 9, "out": 6, "hash_ids": [1, 2], "think_time": 20}"#;
    let next = r#"{"t": 57, "type": "s", "in": 9, "out": 6, "hash_ids": [1, 2], "think_time": 47}"#;
    check_turns(&[FIRST, unknown, next], &[(0, &[], 0), (0, &[0], 20), (0, &[1], 7)]);
}

#[test]
fn sub_agents_in_a_row_fork_and_the_next_turn_joins_them() {
    let sub = r#"{"t": 31, "duration_ms": 20000, "type": "subagent", "requests": [
        {"t": 0, "type": "n", "in": 4, "out": 1, "hash_ids": [1], "api_time": 5, "think_time": 0},
        {"t": 8, "type": "n", "in": 8, "out": 1, "hash_ids": [1, 9], "api_time": 5, "think_time": 3}]}"#
        .replace('\n', "");
    let other = r#"{"t": 22, "duration_ms": 11000, "type": "subagent", "requests": [
        {"t": 1, "type": "n", "in": 4, "out": 1, "hash_ids": [1], "api_time": 5, "think_time": 0}]}"#
        .replace('\n', "");
    let empty = r#"{"t": 22, "duration_ms": 11000, "type": "subagent", "requests": []}"#;
    let next = r#"{"t": 40, "type": "n", "in": 9, "out": 1, "hash_ids": [1, 2], "api_time": 4, "think_time": 30}"#;
    // Both started at 11 s, 1 s after the end of the first turn; the later one's last request ended at 24 s.
    let expected: &[(u32, &[u32], u64)] = &[(0, &[], 0), (1, &[0], 1), (1, &[1], 3), (2, &[0], 2), (0, &[2, 3], 16)];
    check_turns(&[FIRST, &sub, &other, empty, next], expected);
    check_turns(&[FIRST, empty, next], &[(0, &[], 0), (0, &[0], 30)]);
}

#[test]
fn ids_are_local_to_a_session_and_a_sub_agents_ids_to_its_kind() {
    let sub =
        r#"{"t": 9, "type": "subagent", "requests": [{"t": 0, "type": "n", "in": 5, "out": 0, "hash_ids": [1]}]}"#;
    let trace = read(&format!("{}\n{}", line("a", &[FIRST, sub, sub]), line("b", &[FIRST])));
    let first_id = |session: usize, turn: usize| trace.sessions[session].turns[turn].content[0];
    assert_ne!(first_id(0, 0), first_id(1, 0), "two sessions");
    assert_ne!(first_id(0, 0), first_id(0, 1), "root and sub-agent");
    assert_eq!(
        first_id(0, 1),
        first_id(0, 2),
        "two sub-agents of a session share their boilerplate"
    );
    assert_eq!(
        trace.sessions[0].turns[1].output_tokens, 1,
        "no output counts as one token"
    );
    assert_eq!(trace.block_size, 4);
    let first = |turn: u32| trace.is_first_of_agent(TurnRef { session: 0, turn });
    assert_eq!(
        [first(0), first(1), first(2)],
        [true; 3],
        "one turn each of three agents"
    );
}

#[test]
fn sessions_of_one_version_share_its_boilerplate() {
    let session = |id: &str, tools: u32, system: u32, ids: [u64; 4]| {
        format!(
            r#"{{"id": "{id}", "block_size": 4, "tool_tokens": {tools}, "system_tokens": {system}, "requests": [
            {{"t": 0, "type": "n", "in": 17, "out": 1, "hash_ids": [{0}, {1}, {2}, {3}]}},
            {{"t": 1, "type": "n", "in": 13, "out": 1, "hash_ids": [{0}, 90, {1}]}},
            {{"t": 2, "type": "subagent", "requests": [{{"t": 0, "type": "n", "in": 5, "out": 1, "hash_ids": [{0}]}}]}}]}}"#,
            ids[0], ids[1], ids[2], ids[3]
        )
        .replace('\n', "")
    };
    let lines = [
        session("a", 8, 5, [0, 1, 2, 3]),
        session("b", 8, 5, [5, 6, 7, 8]),
        session("c", 8, 6, [5, 6, 7, 8]),
        session("d", 9, 5, [5, 6, 7, 8]),
    ]
    .join("\n");
    let trace = read(&lines);
    let ids = |session: usize, turn: usize| &trace.sessions[session].turns[turn].content[..];
    let shared = |one: usize, other: usize| {
        let (one, other) = (ids(one, 0), ids(other, 0));
        one.iter()
            .zip(other)
            .map(|(one, other)| one == other)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        shared(0, 1),
        [true, true, true, false],
        "13 tokens are three whole blocks"
    );
    assert_eq!(
        shared(0, 2),
        [true, true, false, false],
        "another system prompt after equal tools"
    );
    assert_eq!(shared(0, 3), [false; 4], "other tools");
    assert_eq!(ids(0, 1)[0], ids(0, 0)[0]);
    assert!(
        !ids(0, 0).contains(&ids(0, 1)[2]),
        "a block elsewhere is no boilerplate"
    );
    assert_ne!(ids(0, 2)[0], ids(0, 0)[0], "sub-agents have their own");
    let options = ReadOptions {
        shared_boilerplate: false,
        ..ReadOptions::default()
    };
    let trace = read_trace_with("test", lines.as_bytes(), &options).expect("a good trace");
    let ids = |session: usize| &trace.sessions[session].turns[0].content;
    assert!(!ids(0).iter().any(|id| ids(1).contains(id)), "switched off");
}

#[test]
fn broken_requests_name_their_field() {
    let request = |field: &str, value: &str| {
        FIRST.replacen(
            &format!("\"{field}\": "),
            &format!("\"{field}\": {value}, \"was\": "),
            1,
        )
    };
    check_error(&[], "line 1: field `requests` is `[]`, expected at least one request");
    check_error(
        &[FIRST, &request("in", "14")],
        "line 1: field `requests[1].hash_ids` is `2 ids`, expected 3 ids, one for each whole block of an `in` of 14",
    );
    check_error(
        &[&request("in", "-1")],
        "line 1: field `requests[0].in` is `-1`, expected a number of tokens, at least 1",
    );
    check_error(
        &[&request("type", "\"x\"")],
        "line 1: field `requests[0].type` is `x`, expected `n`, `s` or `subagent`",
    );
    check_error(
        &[&request("think_time", "-0.5")],
        "line 1: field `requests[0].think_time` is `-0.5`, expected the client's time in seconds, at least 0",
    );
    check_error(
        &[FIRST, &request("think_time", "1e12")],
        "line 1: field `requests[1].think_time` is `1000000000000`, expected the client's time in seconds, at least 0, within a year",
    );
    check_error(
        &[FIRST, "7"],
        "line 1: field `requests[1]` is `7`, expected an object that has each field once",
    );
    check_error(
        &[&request("hash_ids", "[1, 2.5]")],
        "line 1: field `requests[0].hash_ids[1]` is `2.5`, expected a block id, a whole number from 0",
    );
    check_error(
        &[&request("t", "null")],
        "line 1: field `requests[0].t` is missing, expected a time in seconds, at least 0",
    );
    let far = "a time in seconds, at least 0, within a year";
    check_error(
        &[&request("t", "1e300")],
        &format!(
            "line 1: field `requests[0].t` is `1{}`, expected {far}",
            "0".repeat(39) + "…"
        ),
    );
}

#[test]
fn sessions_must_agree_and_have_names_of_their_own() {
    let check = |second: &str, expected: &str| {
        let lines = format!("{}\n{second}", line("a", &[FIRST]));
        assert_eq!(
            read_trace("test", lines.as_bytes())
                .expect_err("a broken trace")
                .to_string(),
            expected
        );
    };
    check(
        &line("a", &[FIRST]),
        "line 2: field `id` is `a`, expected a name of its own: session 1 has it too",
    );
    check(
        &line("b", &[FIRST]).replace("\"block_size\": 4", "\"block_size\": 8"),
        "line 2: field `block_size` is `8`, expected 4, the block size of the lines before",
    );
    check(
        &line("b", &[FIRST]).replace("local", "everywhere"),
        "line 2: field `hash_id_scope` is `everywhere`, expected `local` or `global`",
    );
}

#[test]
fn a_sub_agent_that_could_not_have_been_done_by_then_starts_then() {
    let sub = r#"{"t": 15, "duration_ms": 90000, "type": "subagent", "requests": [{"t": 0, "type": "n", "in": 5, "out": 0, "hash_ids": [1]}]}"#;
    let trace = read(&line("a", &[FIRST, sub]));
    assert_eq!(trace.sessions[0].turns[1].gap, Duration::from_secs(5));
}
