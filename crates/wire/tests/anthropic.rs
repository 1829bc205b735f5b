//! The Messages API: translations checked by hand against the public reference, and streams against whole answers.

use bytes::Bytes;
use homing_wire::anthropic::{MessageStream, count_to_chat, to_chat};
use homing_wire::openai::{AnswerParts, ApiError, Body, ChatRequest};
use homing_wire::sse::SseDecoder;
use proptest::prelude::*;
use serde_json::{Value, json};

fn translate(request: &str) -> Result<String, ApiError> {
    let body = Body::parse(&Bytes::copy_from_slice(request.as_bytes())).expect(request);
    let chat = to_chat(&body)?;
    ChatRequest::from_body(&chat)?;
    Ok(String::from_utf8(chat.to_bytes().to_vec()).expect("JSON is UTF-8"))
}

/// The members in the middle are those of interest.
fn check(members: &str, expected: &str) {
    let request = format!(r#"{{"model":"m","max_tokens":9,{members}}}"#);
    let found = translate(&request).unwrap_or_else(|error| panic!("{members}: {error}"));
    let (found, expected): (Value, Value) = (
        serde_json::from_str(&found).expect("JSON"),
        serde_json::from_str(&format!(r#"{{"model":"m","max_tokens":9,{expected}}}"#)).expect(expected),
    );
    assert_eq!(found, expected, "{members}");
}

const HI: &str = r#""messages":[{"role":"user","content":"hi"}]"#;

#[test]
fn system_and_text_become_messages() {
    check(HI, HI);
    check(
        r#""system":"be brief","messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b","cache_control":{"type":"ephemeral"}}]}]"#,
        r#""messages":[{"role":"system","content":"be brief"},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]"#,
    );
    check(
        r#""system":[{"type":"text","text":"a"},{"type":"text","text":"b","cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"ho"},{"role":"system","content":"note"},{"role":"ctx","content":"x"}]"#,
        r#""messages":[{"role":"system","content":"ab"},{"role":"user","content":"hi"},{"role":"assistant","content":"ho"},{"role":"system","content":"note"},{"role":"user","content":"x"}]"#,
    );
}

#[test]
fn tools_are_called_and_answered() {
    check(
        r#""messages":[
            {"role":"user","content":"weather?"},
            {"role":"assistant","content":[
                {"type":"thinking","thinking":"hm","signature":"s"},{"type":"redacted_thinking","data":"x"},
                {"type":"text","text":"I look."},
                {"type":"tool_use","id":"toolu_1","name":"get","input":{"z":1.50,"a":"\u00e9"}},
                {"type":"tool_use","id":"toolu_2","name":"now","input":{}}]},
            {"role":"user","content":[
                {"type":"tool_result","tool_use_id":"toolu_1","content":"15 C"},
                {"type":"tool_result","tool_use_id":"toolu_2","is_error":true,"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
                {"type":"tool_result","tool_use_id":"toolu_3"},
                {"type":"text","text":"and now?"}]}]"#,
        r#""messages":[
            {"role":"user","content":"weather?"},
            {"role":"assistant","content":"I look.","reasoning":"hm","reasoning_content":"hm","tool_calls":[
                {"id":"toolu_1","type":"function","function":{"name":"get","arguments":"{\"z\":1.50,\"a\":\"\\u00e9\"}"}},
                {"id":"toolu_2","type":"function","function":{"name":"now","arguments":"{}"}}]},
            {"role":"tool","tool_call_id":"toolu_1","content":"15 C"},
            {"role":"tool","tool_call_id":"toolu_2","content":"a\nb"},
            {"role":"tool","tool_call_id":"toolu_3","content":""},
            {"role":"user","content":"and now?"}]"#,
    );
    check(
        r#""messages":[{"role":"user","content":"x"},{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f"}]}]"#,
        r#""messages":[{"role":"user","content":"x"},{"role":"assistant","content":null,"tool_calls":[{"id":"t","type":"function","function":{"name":"f","arguments":"{}"}}]}]"#,
    );
}

#[test]
fn tools_and_the_choice_of_one_are_translated() {
    let tools = r#""tools":[{"name":"get","description":"d","input_schema":{"type":"object","properties":{"z":{},"a":{}}},"cache_control":{"type":"ephemeral"}}]"#;
    let chat = r#""tools":[{"type":"function","function":{"name":"get","description":"d","parameters":{"type":"object","properties":{"z":{},"a":{}}}}}]"#;
    let choice = |given: &str, expected: &str| {
        check(
            &format!(r#"{HI},{tools},"tool_choice":{given}"#),
            &format!("{HI},{chat},{expected}"),
        );
    };
    choice(r#"{"type":"auto"}"#, r#""tool_choice":"auto""#);
    choice(r#"{"type":"none"}"#, r#""tool_choice":"none""#);
    choice(
        r#"{"type":"any","disable_parallel_tool_use":true}"#,
        r#""tool_choice":"required","parallel_tool_calls":false"#,
    );
    choice(
        r#"{"type":"tool","name":"get"}"#,
        r#""tool_choice":{"type":"function","function":{"name":"get"}}"#,
    );
    // A schema is passed on word for word: its order of keys is part of the prompt.
    let request = format!(r#"{{"max_tokens":1,{HI},{tools}}}"#);
    assert!(
        translate(&request)
            .expect("a request")
            .contains(r#"{"type":"object","properties":{"z":{},"a":{}}}"#)
    );
}

#[test]
fn parameters_are_renamed_dropped_or_passed_on() {
    check(
        &format!(
            r#"{HI},"stop_sequences":["a","b"],"temperature":0.5,"top_p":0.9,"top_k":-1,"stream":true,"metadata":{{"user_id":"u"}},"service_tier":"auto","thinking":{{"type":"enabled","budget_tokens":1024}},"context_management":{{"edits":[]}},"min_p":0.1,"chat_template_kwargs":{{"x":1}}"#
        ),
        &format!(
            r#"{HI},"stop":["a","b"],"temperature":0.5,"top_p":0.9,"top_k":-1,"stream":true,"min_p":0.1,"chat_template_kwargs":{{"x":1}}"#
        ),
    );
    check(
        &format!(
            r#"{HI},"output_config":{{"effort":"max","format":{{"type":"json_schema","schema":{{"type":"object"}}}}}}"#
        ),
        &format!(
            r#"{HI},"reasoning_effort":"high","response_format":{{"type":"json_schema","json_schema":{{"name":"output","schema":{{"type":"object"}}}}}}"#
        ),
    );
    let body = Body::parse(&format!(r#"{{"model":"m",{HI},"system":"s"}}"#).into()).expect("an object");
    let counted = count_to_chat(&body).expect("counting needs no `max_tokens`").to_bytes();
    assert_eq!(
        counted,
        r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":"hi"}],"model":"m"}"#
    );
}

#[test]
fn what_cannot_be_translated_is_named() {
    let refused = |members: &str, param: &str| {
        let error = translate(&format!(r#"{{"max_tokens":1,{members}}}"#)).expect_err(members);
        assert_eq!(
            (error.status, error.param.as_deref()),
            (400, Some(param)),
            "{members}: {error}"
        );
        assert!(error.message.starts_with(&format!("`{param}`")), "{error}");
    };
    let content =
        |block: &str| format!(r#""messages":[{{"role":"user","content":[{{"type":"text","text":"a"}},{block}]}}]"#);
    refused(
        &content(r#"{"type":"image","source":{"type":"base64","media_type":"image/png","data":""}}"#),
        "messages[0].content[1].type",
    );
    refused(
        &content(r#"{"type":"tool_result","tool_use_id":"t","content":[{"type":"image","source":{}}]}"#),
        "messages[0].content[1].content[0].type",
    );
    refused(
        &content(r#"{"type":"tool_result"}"#),
        "messages[0].content[1].tool_use_id",
    );
    refused(&content(r#"{"text":"a"}"#), "messages[0].content[1].type");
    refused(&content(r#"{"type":"text"}"#), "messages[0].content[1].text");
    refused(r#""messages":[{"role":"robot","content":"a"}]"#, "messages[0].role");
    refused(r#""messages":[{"role":"user"}]"#, "messages[0].content");
    refused(r#""messages":[]"#, "messages");
    refused(r#""system":"a""#, "messages");
    refused(
        r#""messages":[{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":[]}]}]"#,
        "messages[0].content[0].input",
    );
    refused(&format!(r#"{HI},"system":[{{"type":"image"}}]"#), "system[0].type");
    refused(
        &format!(r#"{HI},"tools":[{{"type":"bash_20250124","name":"bash"}}]"#),
        "tools[0].type",
    );
    refused(&format!(r#"{HI},"tools":[{{"name":"f"}}]"#), "tools[0].input_schema");
    refused(&format!(r#"{HI},"tool_choice":{{"type":"tool"}}"#), "tool_choice.name");
    refused(&format!(r#"{HI},"mcp_servers":[{{"url":"u"}}]"#), "mcp_servers");
    refused(&format!(r#"{HI},"container":"c""#), "container");
    refused(
        &format!(r#"{HI},"output_config":{{"format":{{"type":"xml"}}}}"#),
        "output_config.format.type",
    );
    let error = translate(&format!("{{{HI}}}")).expect_err("`max_tokens` is required");
    assert_eq!(error.param.as_deref(), Some("max_tokens"));
}

fn chunk(json: &Value) -> AnswerParts {
    AnswerParts::parse(&json.to_string().into()).expect("a chunk")
}

/// The events of an answer: names and data.
fn events_of(chunks: &[Value]) -> (Vec<(String, Value)>, Value) {
    let mut stream = MessageStream::new("msg_1", "m");
    stream.expect(30, 16);
    let mut decoder = SseDecoder::default();
    for json in chunks {
        decoder.push(&stream.take(&chunk(json)).expect("chunks that make sense"));
    }
    decoder.push(&stream.finish());
    let mut events = Vec::new();
    while let Some(event) = decoder.poll().expect("short events") {
        let data: Value = serde_json::from_slice(&event.data).expect("JSON");
        let name = event.event.expect("each event is named");
        assert_eq!(data["type"], name, "the name is in the data too");
        events.push((name, data));
    }
    let whole = serde_json::from_slice(&stream.whole()).expect("JSON");
    (events, whole)
}

fn delta(delta: Value) -> Value {
    json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

fn tool(index: usize, id: Option<&str>, name: Option<&str>, arguments: &str) -> Value {
    let mut call = json!({"index": index, "function": {"arguments": arguments}});
    if let (Some(id), Some(name)) = (id, name) {
        call =
            json!({"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    }
    delta(json!({"tool_calls": [call]}))
}

fn end(reason: &str, stop: Value) -> [Value; 2] {
    [
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason, "stop_reason": stop}]}),
        json!({"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 7, "total_tokens": 37,
            "prompt_tokens_details": {"cached_tokens": 20}}}),
    ]
}

#[test]
fn events_come_as_the_reference_has_them() {
    let mut chunks = vec![
        delta(json!({"role": "assistant", "content": ""})),
        delta(json!({"content": "Let me"})),
        delta(json!({"content": " see"})),
        tool(0, Some("call_1"), Some("get_weather"), ""),
        tool(0, None, None, "{\"location\":"),
        tool(0, None, None, " \"Paris\"}"),
    ];
    chunks.extend(end("tool_calls", Value::Null));
    let (events, whole) = events_of(&chunks);
    let usage = |input, cached, output| json!({"input_tokens": input, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached, "output_tokens": output});
    let expected = [
        json!({"type": "message_start", "message": {"id": "msg_1", "type": "message", "role": "assistant", "model": "m",
            "content": [], "stop_reason": null, "stop_sequence": null, "usage": usage(14, 16, 0)}}),
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        json!({"type": "ping"}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Let me"}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " see"}}),
        json!({"type": "content_block_stop", "index": 0}),
        json!({"type": "content_block_start", "index": 1, "content_block":
            {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {}}}),
        json!({"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{\"location\":"}}),
        json!({"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": " \"Paris\"}"}}),
        json!({"type": "content_block_stop", "index": 1}),
        json!({"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": null}, "usage": usage(10, 20, 7)}),
        json!({"type": "message_stop"}),
    ];
    let found: Vec<&Value> = events.iter().map(|(_, data)| data).collect();
    assert_eq!(found, expected.iter().collect::<Vec<_>>());
    assert_eq!(
        whole,
        json!({"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use",
            "stop_sequence": null, "usage": usage(10, 20, 7), "content": [{"type": "text", "text": "Let me see"},
            {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"location": "Paris"}}]})
    );
}

#[test]
fn ends_have_anthropics_reasons() {
    let check = |reason: &str, stop: Value, calls: bool, expected: (&str, Value)| {
        let mut chunks = vec![delta(json!({"content": "a"}))];
        if calls {
            chunks.push(tool(0, Some("c"), Some("f"), "not json"));
        }
        chunks.extend(end(reason, stop));
        let (_, whole) = events_of(&chunks);
        assert_eq!(
            (&whole["stop_reason"], &whole["stop_sequence"]),
            (&json!(expected.0), &expected.1),
            "{reason}"
        );
        if calls {
            assert_eq!(whole["content"][1]["input"], json!({"INVALID_JSON": "not json"}));
        }
    };
    check("stop", Value::Null, false, ("end_turn", Value::Null));
    check("stop", json!(128_009), false, ("end_turn", Value::Null));
    check("stop", json!("END"), false, ("stop_sequence", json!("END")));
    check("length", Value::Null, false, ("max_tokens", Value::Null));
    check("stop", Value::Null, true, ("tool_use", Value::Null));
    check("tool_calls", Value::Null, true, ("tool_use", Value::Null));
    check("content_filter", Value::Null, false, ("refusal", Value::Null));
    let (events, whole) = events_of(&end("stop", Value::Null));
    assert_eq!(events.len(), 3, "an answer of nothing has no blocks: {events:?}");
    assert_eq!(whole["content"], json!([]));
}

#[test]
fn calls_that_make_no_sense_are_faults() {
    let mut stream = MessageStream::new("msg_1", "m");
    let mut take = |json: Value| stream.take(&chunk(&json));
    assert!(take(tool(0, None, None, "{}")).is_err(), "no name");
    take(tool(0, Some("a"), Some("f"), "{")).expect("a call");
    take(tool(1, Some("b"), Some("f"), "{}")).expect("the next");
    assert!(take(tool(0, None, None, "}")).is_err(), "the first is over");
}

/// Puts a message together from its events as a client does.
fn reassembled(events: &[(String, Value)]) -> Value {
    let mut message = Value::Null;
    let mut inputs: Vec<String> = Vec::new();
    for (name, data) in events {
        let index = usize::try_from(data["index"].as_u64().unwrap_or_default()).expect("an index");
        match name.as_str() {
            "message_start" => message = data["message"].clone(),
            "content_block_start" => {
                assert_eq!(index, inputs.len(), "blocks are numbered in order");
                inputs.push(String::new());
                message["content"]
                    .as_array_mut()
                    .expect("a list")
                    .push(data["content_block"].clone());
            }
            "content_block_delta" => {
                assert_eq!(index + 1, inputs.len(), "only the last block is open");
                let block = &mut message["content"][index];
                for (field, piece) in [("text", "text"), ("thinking", "thinking")] {
                    if let Some(piece) = data["delta"][piece].as_str() {
                        block[field] = json!(format!("{}{piece}", block[field].as_str().expect("a string")));
                    }
                }
                inputs[index].push_str(data["delta"]["partial_json"].as_str().unwrap_or_default());
            }
            "content_block_stop" => {
                if message["content"][index]["type"] == "tool_use" && !inputs[index].is_empty() {
                    message["content"][index]["input"] = serde_json::from_str(&inputs[index]).expect("JSON");
                }
            }
            "message_delta" => {
                message["stop_reason"] = data["delta"]["stop_reason"].clone();
                message["stop_sequence"] = data["delta"]["stop_sequence"].clone();
                message["usage"] = data["usage"].clone();
            }
            "ping" | "message_stop" => {}
            other => panic!("the event `{other}`"),
        }
    }
    message
}

fn texts() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec("[a-z\u{e9}\"\\\\ \n]{0,6}", 0..4)
}

proptest! {
    #[test]
    fn a_stream_put_together_is_the_whole_answer(
        thoughts in texts(),
        said in texts(),
        calls in prop::collection::vec(("[a-z]{1,5}", prop::option::of(0_i64..1_000_000), 1_usize..5), 0..3),
        reason in prop::sample::select(vec!["stop", "length", "tool_calls"]),
    ) {
        let mut chunks = vec![delta(json!({"role": "assistant", "content": ""}))];
        chunks.extend(thoughts.iter().map(|text| delta(json!({"reasoning": text}))));
        chunks.extend(said.iter().map(|text| delta(json!({"content": text}))));
        for (index, (name, number, pieces)) in calls.iter().enumerate() {
            let arguments = number.map_or(String::new(), |number| json!({"key": number, "a": name}).to_string());
            chunks.push(tool(index, Some(&format!("call_{index}")), Some(name), ""));
            let size = arguments.len().div_ceil(*pieces).max(1);
            for piece in arguments.as_bytes().chunks(size) {
                chunks.push(tool(index, None, None, std::str::from_utf8(piece).expect("ASCII")));
            }
        }
        chunks.extend(end(reason, Value::Null));
        let (events, whole) = events_of(&chunks);
        prop_assert_eq!(&reassembled(&events), &whole);
        let text: String = whole["content"].as_array().expect("a list").iter().filter_map(|block| block["text"].as_str()).collect();
        prop_assert_eq!(text, said.concat());
    }

    /// What makes caches work: a history that grew is rendered as before, and then goes on.
    #[test]
    fn a_longer_history_begins_as_the_shorter_one(
        turns in prop::collection::vec((any::<bool>(), any::<bool>(), 0_usize..3, "[a-z\u{e9}]{0,5}"), 1..6),
    ) {
        let mut history = vec![json!({"role": "user", "content": "start"})];
        let mut earlier: Vec<Value> = Vec::new();
        for (thinks, speaks, calls, text) in &turns {
            let mut blocks = Vec::new();
            if *thinks {
                blocks.push(json!({"type": "thinking", "thinking": text, "signature": "s"}));
            }
            if *speaks {
                blocks.push(json!({"type": "text", "text": text}));
            }
            blocks.extend((0..*calls).map(|call| json!({"type": "tool_use", "id": format!("t{call}"), "name": "f", "input": {"z": text, "a": 1}})));
            history.push(json!({"role": "assistant", "content": blocks}));
            let mut answers: Vec<Value> =
                (0..*calls).map(|call| json!({"type": "tool_result", "tool_use_id": format!("t{call}"), "content": text})).collect();
            answers.push(json!({"type": "text", "text": "on"}));
            history.push(json!({"role": "user", "content": answers}));
            let request = json!({"max_tokens": 1, "system": "s", "messages": history}).to_string();
            let chat: Value = serde_json::from_str(&translate(&request).expect("a request")).expect("JSON");
            let messages = chat["messages"].as_array().expect("a list").clone();
            prop_assert_eq!(&messages[..earlier.len()], &earlier[..]);
            prop_assert!(messages.len() > earlier.len());
            earlier = messages;
        }
    }
}
