//! The Responses API: translations checked by hand against the public reference, and streams against whole answers.

use bytes::Bytes;
use homing_wire::openai::{AnswerParts, ApiError, Body, ChatRequest};
use homing_wire::responses::{ResponseStream, to_chat};
use homing_wire::sse::SseDecoder;
use proptest::prelude::*;
use serde_json::{Value, json};

fn body(request: &str) -> Body {
    Body::parse(&Bytes::copy_from_slice(request.as_bytes())).expect(request)
}

fn translate(request: &str) -> Result<Value, ApiError> {
    let (chat, _) = to_chat(&body(request))?;
    ChatRequest::from_body(&chat)?;
    Ok(serde_json::from_slice(&chat.to_bytes()).expect("JSON"))
}

/// The members after the model.
fn check(members: &str, expected: &str) {
    let found =
        translate(&format!(r#"{{"model":"m",{members}}}"#)).unwrap_or_else(|error| panic!("{members}: {error}"));
    let expected: Value = serde_json::from_str(&format!(r#"{{"model":"m",{expected}}}"#)).expect(expected);
    assert_eq!(found, expected, "{members}");
}

const HI: &str = r#""messages":[{"role":"user","content":"hi"}]"#;

#[test]
fn input_becomes_messages() {
    check(r#""input":"hi""#, HI);
    check(r#""input":[{"role":"user","content":"hi"}]"#, HI);
    check(
        r#""instructions":"be brief","input":[
            {"type":"message","role":"developer","content":[{"type":"input_text","text":"rules"}]},
            {"type":"message","role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_text","text":"b"}]},
            {"type":"message","role":"assistant","content":[{"type":"output_text","text":"c","annotations":[]}]},
            {"type":"message","role":"developer","content":"later"},
            {"type":"message","role":"user","content":"d"}]"#,
        r#""messages":[
            {"role":"system","content":"be brief\n\nrules"},
            {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
            {"role":"assistant","content":"c"},
            {"role":"system","content":"later"},
            {"role":"user","content":"d"}]"#,
    );
}

#[test]
fn a_turn_of_the_model_is_one_message_again() {
    check(
        r#""input":[
            {"role":"user","content":"x"},
            {"type":"reasoning","id":"rs_1","summary":[],"content":[{"type":"reasoning_text","text":"hm"}]},
            {"type":"message","role":"assistant","content":[{"type":"output_text","text":"I look."}]},
            {"type":"function_call","call_id":"c1","name":"shell","arguments":"{\"cmd\": \"ls\"}"},
            {"type":"custom_tool_call","call_id":"c2","name":"patch","input":"*** \"a\""},
            {"type":"function_call_output","call_id":"c1","output":"file"},
            {"type":"custom_tool_call_output","call_id":"c2","output":[{"type":"input_text","text":"a"},{"type":"input_text","text":"b"}]},
            {"type":"reasoning","summary":[],"encrypted_content":"gAAA"},
            {"type":"function_call","call_id":"c3","name":"shell","arguments":"{}"}]"#,
        r#""messages":[
            {"role":"user","content":"x"},
            {"role":"assistant","content":"I look.","reasoning":"hm","reasoning_content":"hm","tool_calls":[
                {"id":"c1","type":"function","function":{"name":"shell","arguments":"{\"cmd\": \"ls\"}"}},
                {"id":"c2","type":"function","function":{"name":"patch","arguments":"{\"input\":\"*** \\\"a\\\"\"}"}}]},
            {"role":"tool","tool_call_id":"c1","content":"file"},
            {"role":"tool","tool_call_id":"c2","content":"a\nb"},
            {"role":"assistant","content":null,"tool_calls":[{"id":"c3","type":"function","function":{"name":"shell","arguments":"{}"}}]}]"#,
    );
}

#[test]
fn what_codex_sends_is_translated() {
    check(
        r#""instructions":"You are Codex","input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}],
           "tools":[{"type":"function","name":"shell","description":"d","strict":false,"parameters":{"type":"object","properties":{"z":{},"a":{}}}},
                    {"type":"custom","name":"patch","description":"d","format":{"type":"grammar","syntax":"lark","definition":"start: X"}},
                    {"type":"web_search","external_web_access":false}],
           "tool_choice":"auto","parallel_tool_calls":false,"reasoning":{"effort":"medium","summary":"auto"},"store":false,"stream":true,
           "include":["reasoning.encrypted_content"],"prompt_cache_key":"k","text":{"verbosity":"low"},"client_metadata":{"x":"y"}"#,
        r#""messages":[{"role":"system","content":"You are Codex"},{"role":"user","content":"hi"}],
           "tools":[{"type":"function","function":{"name":"shell","description":"d","strict":false,"parameters":{"type":"object","properties":{"z":{},"a":{}}}}},
                    {"type":"function","function":{"name":"patch","description":"d\n\n`input` follows this grammar:\nstart: X",
                        "parameters":{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}}}],
           "tool_choice":"auto","parallel_tool_calls":false,"reasoning_effort":"medium","stream":true,"prompt_cache_key":"k","verbosity":"low""#,
    );
}

#[test]
fn tools_in_namespaces_have_one_name_in_chat_and_two_in_the_answer() {
    let tools = r#""tools":[{"type":"namespace","name":"agents","description":"d","tools":[
        {"type":"function","name":"spawn","description":"s","strict":false,"parameters":{"type":"object"}},
        {"type":"custom","name":"note"}]}]"#;
    let text = format!(
        r#"{tools},"input":[{{"role":"user","content":"hi"}},
        {{"type":"function_call","call_id":"c1","namespace":"agents","name":"spawn","arguments":"{{}}"}},
        {{"type":"function_call_output","call_id":"c1","output":"done"}}]"#
    );
    check(
        &text,
        r#""messages":[{"role":"user","content":"hi"},
            {"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"agents__spawn","arguments":"{}"}}]},
            {"role":"tool","tool_call_id":"c1","content":"done"}],
           "tools":[{"type":"function","function":{"name":"agents__spawn","description":"s","strict":false,"parameters":{"type":"object"}}},
                    {"type":"function","function":{"name":"agents__note",
                        "parameters":{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}}}]"#,
    );
    let (_, echo) = to_chat(&body(&format!(r#"{{"model":"m",{text}}}"#))).expect("a request");
    let mut stream = ResponseStream::new("1", "m", 7, echo);
    for json in [
        tool(0, Some(("c2", "agents__spawn")), ""),
        tool(0, None, "{}"),
        tool(1, Some(("c3", "agents__note")), r#"{"input":"x"}"#),
    ] {
        stream.take(&chunk(&json)).expect("chunks that make sense");
    }
    drop(stream.finish());
    let whole: Value = serde_json::from_slice(&stream.whole()).expect("JSON");
    let call = json!({"id": "fc_1_0", "type": "function_call", "call_id": "c2", "namespace": "agents", "name": "spawn", "arguments": "{}", "status": "completed"});
    let note = json!({"id": "ctc_1_1", "type": "custom_tool_call", "call_id": "c3", "namespace": "agents", "name": "note", "input": "x", "status": "completed"});
    assert_eq!(whole["output"], json!([call, note]));
    assert_eq!(whole["tools"][0]["type"], "namespace", "repeated as it was sent");
}

#[test]
fn parameters_are_renamed_dropped_or_passed_on() {
    check(
        r#""input":"hi","max_output_tokens":7,"temperature":0,"top_p":0.5,"metadata":{"a":"b"},"truncation":"disabled","previous_response_id":null,
           "background":false,"service_tier":"auto","min_p":0.1,"tools":[],"tool_choice":"auto","parallel_tool_calls":true,
           "text":{"format":{"type":"json_schema","name":"n","strict":true,"schema":{"type":"object"}}}"#,
        &format!(
            r#"{HI},"max_completion_tokens":7,"temperature":0,"top_p":0.5,"min_p":0.1,"response_format":{{"type":"json_schema","json_schema":{{"name":"n","schema":{{"type":"object"}},"strict":true}}}}"#
        ),
    );
    let tools = r#""tools":[{"type":"function","name":"f","parameters":null}]"#;
    let chat = r#""tools":[{"type":"function","function":{"name":"f"}}]"#;
    check(
        &format!(r#""input":"hi",{tools},"tool_choice":{{"type":"function","name":"f"}}"#),
        &format!(r#"{HI},{chat},"tool_choice":{{"type":"function","function":{{"name":"f"}}}}"#),
    );
    check(
        &format!(r#""input":"hi",{tools},"tool_choice":"required""#),
        &format!(r#"{HI},{chat},"tool_choice":"required""#),
    );
}

#[test]
fn what_cannot_be_translated_is_named() {
    let refused = |members: &str, param: &str| {
        let error = translate(&format!(r#"{{"model":"m",{members}}}"#)).expect_err(members);
        assert_eq!(
            (error.status, error.param.as_deref()),
            (400, Some(param)),
            "{members}: {error}"
        );
        assert!(error.message.starts_with(&format!("`{param}`")), "{error}");
    };
    let also = |members: &str, param: &str| refused(&format!(r#""input":"hi",{members}"#), param);
    also(r#""previous_response_id":"resp_1""#, "previous_response_id");
    also(r#""conversation":{"id":"c"}"#, "conversation");
    also(r#""background":true"#, "background");
    also(r#""prompt":{"id":"p"}"#, "prompt");
    also(r#""top_logprobs":3"#, "top_logprobs");
    also(r#""truncation":"auto""#, "truncation");
    also(r#""include":["message.output_text.logprobs"]"#, "include");
    also(r#""tools":[{"type":"file_search"}]"#, "tools[0].type");
    also(r#""tools":[{"type":"function"}]"#, "tools[0].name");
    also(r#""tools":[{"type":"namespace","name":"n"}]"#, "tools[0].tools");
    also(
        r#""tools":[{"type":"namespace","name":"n","tools":[{"type":"file_search"}]}]"#,
        "tools[0].tools[0].type",
    );
    also(
        r#""tools":[{"type":"function","name":"f"},{"type":"web_search"}],"tool_choice":{"type":"web_search"}"#,
        "tool_choice.type",
    );
    also(
        r#""tools":[{"type":"function","name":"f"}],"tool_choice":"some""#,
        "tool_choice",
    );
    also(r#""text":{"format":{"type":"xml"}}"#, "text.format.type");
    refused(r#""instructions":"x""#, "input");
    refused(r#""input":[]"#, "input");
    refused(
        r#""input":[{"role":"user","content":[{"type":"input_image","image_url":"u"}]}]"#,
        "input[0].content[0].type",
    );
    refused(r#""input":[{"role":"user"}]"#, "input[0].content");
    refused(r#""input":[{"role":"robot","content":"x"}]"#, "input[0].role");
    refused(r#""input":[{"type":"item_reference","id":"x"}]"#, "input[0].type");
    refused(
        r#""input":[{"type":"function_call_output","output":"x"}]"#,
        "input[0].call_id",
    );
}

fn chunk(json: &Value) -> AnswerParts {
    AnswerParts::parse(&json.to_string().into()).expect("a chunk")
}

const REQUEST: &str = r#"{"model":"m","input":"hi","instructions":"be brief","tools":[
    {"type":"function","name":"get","parameters":{}},{"type":"custom","name":"patch"},{"type":"web_search"}]}"#;

fn stream() -> ResponseStream {
    let (_, echo) = to_chat(&body(REQUEST)).expect("a request");
    ResponseStream::new("1", "m", 7, echo)
}

/// The data of an answer's events, and the whole answer.
fn events_of(chunks: &[Value]) -> (Vec<Value>, Value) {
    let mut stream = stream();
    let mut bytes = Vec::new();
    for json in chunks {
        bytes.extend_from_slice(&stream.take(&chunk(json)).expect("chunks that make sense"));
    }
    bytes.extend_from_slice(&stream.finish());
    (decoded(&bytes), serde_json::from_slice(&stream.whole()).expect("JSON"))
}

fn decoded(bytes: &[u8]) -> Vec<Value> {
    let mut decoder = SseDecoder::default();
    decoder.push(bytes);
    let mut events: Vec<Value> = Vec::new();
    while let Some(event) = decoder.poll().expect("short events") {
        let data: Value = serde_json::from_slice(&event.data).expect("JSON");
        assert_eq!(
            event.event.as_deref(),
            data["type"].as_str(),
            "the name is in the data too"
        );
        assert_eq!(data["sequence_number"], events.len(), "events are numbered");
        events.push(data);
    }
    events
}

fn delta(delta: Value) -> Value {
    json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

fn tool(index: usize, named: Option<(&str, &str)>, arguments: &str) -> Value {
    let mut call = json!({"index": index, "function": {"arguments": arguments}});
    if let Some((id, name)) = named {
        call["id"] = json!(id);
        call["function"]["name"] = json!(name);
    }
    delta(json!({"tool_calls": [call]}))
}

fn end(reason: &str) -> [Value; 2] {
    [
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}),
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
        tool(0, Some(("call_1", "get")), ""),
        tool(0, None, "{\"a\":"),
        tool(0, None, "1}"),
    ];
    chunks.extend(end("tool_calls"));
    let (events, whole) = events_of(&chunks);
    let message = json!({"id": "msg_1_0", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "Let me see", "annotations": [], "logprobs": []}]});
    let call = json!({"id": "fc_1_1", "type": "function_call", "call_id": "call_1", "name": "get", "arguments": "{\"a\":1}", "status": "completed"});
    assert_eq!(
        (
            &whole["id"],
            &whole["object"],
            &whole["status"],
            &whole["created_at"],
            &whole["store"]
        ),
        (
            &json!("resp_1"),
            &json!("response"),
            &json!("completed"),
            &json!(7),
            &json!(false)
        )
    );
    assert_eq!(whole["output"], json!([message, call]));
    assert_eq!(whole["instructions"], "be brief");
    assert_eq!(
        whole["tools"].as_array().expect("a list").len(),
        2,
        "what the model did not get is not there"
    );
    assert_eq!(
        whole["usage"],
        json!({"input_tokens": 30, "input_tokens_details": {"cached_tokens": 20}, "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 37})
    );
    let mut begun = whole.clone();
    begun["status"] = json!("in_progress");
    begun["output"] = json!([]);
    begun["usage"] = Value::Null;
    let empty = json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
    let mut expected = vec![
        json!({"type": "response.created", "response": begun}),
        json!({"type": "response.in_progress", "response": begun}),
        json!({"type": "response.output_item.added", "output_index": 0, "item":
            {"id": "msg_1_0", "type": "message", "role": "assistant", "status": "in_progress", "content": []}}),
        json!({"type": "response.content_part.added", "item_id": "msg_1_0", "output_index": 0, "content_index": 0, "part": empty}),
        json!({"type": "response.output_text.delta", "item_id": "msg_1_0", "output_index": 0, "content_index": 0, "delta": "Let me", "logprobs": []}),
        json!({"type": "response.output_text.delta", "item_id": "msg_1_0", "output_index": 0, "content_index": 0, "delta": " see", "logprobs": []}),
        json!({"type": "response.output_text.done", "item_id": "msg_1_0", "output_index": 0, "content_index": 0, "text": "Let me see", "logprobs": []}),
        json!({"type": "response.content_part.done", "item_id": "msg_1_0", "output_index": 0, "content_index": 0, "part": message["content"][0]}),
        json!({"type": "response.output_item.done", "output_index": 0, "item": message}),
        json!({"type": "response.output_item.added", "output_index": 1, "item":
            {"id": "fc_1_1", "type": "function_call", "call_id": "call_1", "name": "get", "arguments": "", "status": "in_progress"}}),
        json!({"type": "response.function_call_arguments.delta", "item_id": "fc_1_1", "output_index": 1, "delta": "{\"a\":"}),
        json!({"type": "response.function_call_arguments.delta", "item_id": "fc_1_1", "output_index": 1, "delta": "1}"}),
        json!({"type": "response.function_call_arguments.done", "item_id": "fc_1_1", "output_index": 1, "name": "get", "arguments": "{\"a\":1}"}),
        json!({"type": "response.output_item.done", "output_index": 1, "item": call}),
        json!({"type": "response.completed", "response": whole}),
    ];
    for (number, event) in expected.iter_mut().enumerate() {
        event["sequence_number"] = json!(number);
    }
    assert_eq!(events, expected);
}

#[test]
fn tools_of_free_text_come_back_as_such() {
    let check = |arguments: &str, input: &str| {
        let mut chunks = vec![tool(0, Some(("c", "patch")), ""), tool(0, None, arguments)];
        chunks.extend(end("tool_calls"));
        let (events, whole) = events_of(&chunks);
        let item = json!({"id": "ctc_1_0", "type": "custom_tool_call", "call_id": "c", "name": "patch", "input": input, "status": "completed"});
        assert_eq!(whole["output"], json!([item]));
        let of = |kind: &str| {
            events
                .iter()
                .find(|event| event["type"] == kind)
                .cloned()
                .unwrap_or_default()
        };
        assert_eq!(of("response.custom_tool_call_input.delta")["delta"], input);
        assert_eq!(of("response.custom_tool_call_input.done")["input"], input);
        assert!(
            !events
                .iter()
                .any(|event| event["type"] == "response.function_call_arguments.delta")
        );
    };
    check(r#"{"input": "*** a\n"}"#, "*** a\n");
    check("*** bare", "*** bare");
}

#[test]
fn a_response_is_cut_or_fails() {
    let mut chunks = vec![delta(json!({"content": "a"}))];
    chunks.extend(end("length"));
    let (events, whole) = events_of(&chunks);
    assert_eq!(events.last().expect("an end")["type"], "response.incomplete");
    assert_eq!(
        (&whole["status"], &whole["incomplete_details"]),
        (&json!("incomplete"), &json!({"reason": "max_output_tokens"}))
    );
    assert_eq!(whole["output"][0]["status"], "incomplete");
    let mut stream = stream();
    let mut bytes = stream
        .take(&chunk(&delta(json!({"content": "a"}))))
        .expect("a chunk")
        .to_vec();
    bytes.extend_from_slice(&stream.fail(&ApiError::context_too_long(9, 1, 8)));
    let last = decoded(&bytes).pop().expect("an end");
    assert_eq!(last["type"], "response.failed");
    assert_eq!(
        (&last["response"]["status"], &last["response"]["error"]["code"]),
        (&json!("failed"), &json!("context_length_exceeded"))
    );
    assert!(
        stream.take(&chunk(&tool(0, None, "{}"))).is_err(),
        "a call without a name"
    );
}

/// Puts a response together from its deltas, as a client that shows them does.
fn reassembled(events: &[Value]) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    for event in events {
        let index = usize::try_from(event["output_index"].as_u64().unwrap_or_default()).expect("an index");
        let push = |item: &mut Value, pointer: &str| {
            let text = item.pointer_mut(pointer).expect(pointer);
            *text = json!(format!(
                "{}{}",
                text.as_str().expect("a string"),
                event["delta"].as_str().expect("a delta")
            ));
        };
        match event["type"].as_str().expect("a type") {
            "response.output_item.added" => {
                assert_eq!(index, items.len(), "items are numbered in order");
                items.push(event["item"].clone());
            }
            "response.content_part.added" => items[index]["content"] = json!([event["part"]]),
            "response.output_text.delta" | "response.reasoning_text.delta" => {
                push(&mut items[index], "/content/0/text")
            }
            "response.function_call_arguments.delta" => push(&mut items[index], "/arguments"),
            "response.custom_tool_call_input.delta" => push(&mut items[index], "/input"),
            "response.output_item.done" => {
                items[index]["status"] = event["item"]["status"].clone();
                assert_eq!(items[index], event["item"], "the deltas make the item");
            }
            _ => {}
        }
    }
    items
}

proptest! {
    #[test]
    fn a_stream_put_together_is_the_whole_answer(
        thoughts in prop::collection::vec("[a-z\u{e9}\"\\\\ \n]{0,6}", 0..4),
        said in prop::collection::vec("[a-z\u{e9}\"\\\\ \r\n]{0,6}", 0..4),
        calls in prop::collection::vec((prop::sample::select(vec!["get", "patch", "other"]), any::<u16>(), 1_usize..5), 0..3),
        reason in prop::sample::select(vec!["stop", "length", "tool_calls"]),
    ) {
        let mut chunks = vec![delta(json!({"role": "assistant", "content": ""}))];
        chunks.extend(thoughts.iter().map(|text| delta(json!({"reasoning_content": text}))));
        chunks.extend(said.iter().map(|text| delta(json!({"content": text}))));
        for (index, (name, number, pieces)) in calls.iter().enumerate() {
            let arguments = json!({"input": number.to_string(), "a": number}).to_string();
            chunks.push(tool(index, Some((&format!("call_{index}"), name)), ""));
            for piece in arguments.as_bytes().chunks(arguments.len().div_ceil(*pieces)) {
                chunks.push(tool(index, None, std::str::from_utf8(piece).expect("ASCII")));
            }
        }
        chunks.extend(end(reason));
        let (events, whole) = events_of(&chunks);
        prop_assert_eq!(&json!(reassembled(&events)), &whole["output"]);
        prop_assert_eq!(&events[events.len() - 1]["response"], &whole);
    }

    /// What makes caches work: a history that grew is rendered as before, and then goes on.
    #[test]
    fn a_longer_history_begins_as_the_shorter_one(
        turns in prop::collection::vec((any::<bool>(), any::<bool>(), 0_usize..3, "[a-z\u{e9}]{0,5}"), 1..6),
    ) {
        let mut input = vec![json!({"role": "developer", "content": "rules"}), json!({"role": "user", "content": "start"})];
        let mut earlier: Vec<Value> = Vec::new();
        for (thinks, speaks, calls, text) in &turns {
            if *thinks {
                input.push(json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}));
            }
            if *speaks {
                input.push(json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}));
            }
            for call in 0..*calls {
                input.push(json!({"type": "function_call", "call_id": format!("c{call}"), "name": "f", "arguments": "{}"}));
            }
            for call in 0..*calls {
                input.push(json!({"type": "function_call_output", "call_id": format!("c{call}"), "output": text}));
            }
            input.push(json!({"role": "user", "content": "on"}));
            let chat = translate(&json!({"instructions": "s", "input": input}).to_string()).expect("a request");
            let messages = chat["messages"].as_array().expect("a list").clone();
            prop_assert_eq!(&messages[..earlier.len()], &earlier[..]);
            prop_assert!(messages.len() > earlier.len());
            earlier = messages;
        }
    }
}
