//! What requests are taken and what each wrong one is told.

use super::*;

fn completion(text: &str) -> Result<CompletionRequest, ApiError> {
    CompletionRequest::parse(&Bytes::copy_from_slice(text.as_bytes()))
}

fn chat(text: &str) -> Result<ChatRequest, ApiError> {
    ChatRequest::parse(&Bytes::copy_from_slice(text.as_bytes()))
}

/// The same request with its conversation looked at where it lies, and read in one walk: both find the same.
fn looked_at(text: &str) -> Result<GenerationParams, ApiError> {
    let body = Body::parse(&Bytes::copy_from_slice(text.as_bytes()))?;
    let checked = ChatRequest::check(&body);
    let is_plain = |message: &Value| {
        message["role"].as_str().is_some_and(|role| !role.is_empty()) && message["content"].is_string()
    };
    let read = ChatRequest::read::<Value>(&body, is_plain).map(|(params, messages, values)| {
        let parsed: Vec<Value> = messages
            .iter()
            .map(|message| serde_json::from_slice(message).unwrap())
            .collect();
        assert_eq!(values, parsed, "{text}");
        (params, messages)
    });
    assert_eq!(read, checked, "{text}");
    let (params, messages) = checked?;
    assert!(messages.iter().all(|message| message.starts_with(b"{")), "{text}");
    Ok(params)
}

/// A completion with these members beside a prompt.
fn with(members: &str) -> Result<CompletionRequest, ApiError> {
    completion(&format!(r#"{{"prompt":[1,2],{members}}}"#))
}

#[test]
fn prompts_come_in_four_shapes() {
    let check = |prompt: &str, expected: PromptInput| {
        let request = completion(&format!(r#"{{"prompt":{prompt}}}"#)).expect(prompt);
        assert_eq!(request.prompt, expected, "{prompt}");
    };
    check(r#""hi""#, PromptInput::Text("hi".into()));
    check(r#"["hi"]"#, PromptInput::Text("hi".into()));
    check("[1,2]", PromptInput::Ids(vec![1, 2]));
    check("[[1,2]]", PromptInput::Ids(vec![1, 2]));
}

#[test]
fn defaults_are_openais() {
    let request = completion(r#"{"prompt":"x","unknown":{"kept":1}}"#).expect("the least request");
    let params = request.params;
    assert_eq!((params.temperature, params.top_p, params.max_tokens), (1.0, 1.0, None));
    assert!(!params.stream && !params.include_usage && !params.ignore_eos && !params.return_token_ids);
    assert_eq!(
        (params.logprobs, params.min_tokens, params.stop.len(), params.priority),
        (None, 0, 0, 0)
    );
}

#[test]
fn members_are_read() {
    let text = r#""model":"m","max_tokens":7,"max_completion_tokens":5,"min_tokens":2,"temperature":0,"top_p":0.5,
        "seed":-3,"stop":"END","stream":true,"stream_options":{"include_usage":true},"ignore_eos":true,
        "return_token_ids":true,"logprobs":3,"user":"u","n":1,"kv_transfer_params":{"do_remote_decode": true},
        "prompt_cache_key":"k","priority":-2"#;
    let params = with(text).expect("all members are right").params;
    assert_eq!(
        (params.max_tokens, params.min_tokens, params.temperature, params.top_p),
        (Some(5), 2, 0.0, 0.5)
    );
    assert_eq!(
        (params.seed, params.stop, params.logprobs),
        (Some(-3), vec!["END".to_owned()], Some(3))
    );
    assert!(params.stream && params.include_usage && params.ignore_eos && params.return_token_ids);
    assert_eq!(
        params.kv_transfer_params.as_deref(),
        Some(&br#"{"do_remote_decode": true}"#[..])
    );
    assert_eq!((params.prompt_cache_key.as_deref(), params.priority), (Some("k"), -2));
    let nulls = r#""max_tokens":null,"stop":null,"kv_transfer_params":null,"stream":null,"seed":null,"n":null"#;
    assert_eq!(
        with(nulls).expect("null is absent").params,
        with(r#""x":1"#).expect("nothing given").params
    );
}

#[test]
fn wrong_completions_are_told_what_was_expected() {
    let check = |members: &str, param: &str, message: &str| {
        let error = with(members).expect_err(members);
        assert_eq!(
            (error.status, error.param.as_deref()),
            (400, Some(param)),
            "{members}: {error}"
        );
        assert_eq!(error.message, message, "{members}");
    };
    check(
        r#""max_tokens":-1"#,
        "max_tokens",
        "`max_tokens` is `-1`, expected an integer of at least 1 and at most 16777216",
    );
    check(
        r#""max_tokens":"9""#,
        "max_tokens",
        "`max_tokens` is `\"9\"`, expected an integer of at least 1",
    );
    check(
        r#""max_tokens":1.5"#,
        "max_tokens",
        "`max_tokens` is `1.5`, expected an integer of at least 1",
    );
    check(r#""n":2"#, "n", "`n` is `2`, expected 1: one answer a request");
    check(
        r#""temperature":-1"#,
        "temperature",
        "`temperature` is `-1`, expected a number of at least 0",
    );
    check(
        r#""top_p":0"#,
        "top_p",
        "`top_p` is `0`, expected a number above 0 and at most 1",
    );
    check(
        r#""stream":"yes""#,
        "stream",
        "`stream` is `\"yes\"`, expected true or false",
    );
    check(
        r#""stop":[1]"#,
        "stop",
        "`stop` is `[1]`, expected a string or a list of strings",
    );
    check(
        r#""stop":"""#,
        "stop",
        "`stop` has an empty string, expected strings of at least one character",
    );
    check(
        r#""max_tokens":2,"min_tokens":3"#,
        "min_tokens",
        "`min_tokens` is `3`, expected at most `max_tokens`",
    );
    check(
        r#""kv_transfer_params":[1]"#,
        "kv_transfer_params",
        "`kv_transfer_params` is wrong, expected an object",
    );
    let many = format!(r#""stop":[{}"a"]"#, r#""a","#.repeat(MAX_STOP_STRINGS));
    check(&many, "stop", "`stop` has `65` strings, expected at most 64");
}

#[test]
fn wrong_prompts_are_told_what_was_expected() {
    for prompt in [
        r#""""#,
        "[]",
        "[[]]",
        "[[1],[2]]",
        r#"["a","b"]"#,
        "[-1]",
        "[1.5]",
        "{}",
        "7",
        "null",
        "[4294967296]",
    ] {
        let error = completion(&format!(r#"{{"prompt":{prompt}}}"#)).expect_err(prompt);
        assert_eq!(
            (error.status, error.param.as_deref()),
            (400, Some("prompt")),
            "{prompt}: {error}"
        );
        assert!(error.message.contains("expected"), "{prompt}: {error}");
    }
    assert!(completion("{}").expect_err("no prompt").message.contains("missing"));
}

#[test]
fn conversations_are_checked() {
    let text = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
        {"role":"assistant","content":null,"tool_calls":[]},{"role":"x","role":"tool","content":"t","tool_call_id":"1"}],
        "tools":[{"type":"function"}],"logprobs":true,"top_logprobs":2}"#;
    let good = chat(text).expect("a conversation with tools");
    assert_eq!(looked_at(text).as_ref(), Ok(&good.params));
    assert_eq!(
        good.messages[0].content.as_ref().map(|content| content.text()),
        Some(Ok("ab".to_owned()))
    );
    assert_eq!((good.messages.len(), good.tools.map(|tools| tools.len())), (3, Some(1)));
    assert_eq!(good.params.logprobs, Some(2));

    for plain in [
        r#"{"messages":[{"role":"user","content":"a"}]}"#,
        "{\"messages\": [ {\"role\":\"user\",\"content\":\"]},{[\\\"\"}\t,\r\n {\"content\":\"\",\"role\":\"tool\"} ] }",
    ] {
        assert!(looked_at(plain).is_ok(), "{plain}");
    }

    let check = |text: &str, param: &str| {
        let error = chat(text).expect_err(text);
        assert_eq!(
            (error.status, error.param.as_deref()),
            (400, Some(param)),
            "{text}: {error}"
        );
        assert!(error.message.contains("expected"), "{text}: {error}");
        assert_eq!(looked_at(text), Err(error), "looked at where it lies: {text}");
    };
    check(r#"{"messages":[]}"#, "messages");
    check(r#"{"messages":null}"#, "messages");
    check(r#"{"messages":[{"role":"","content":"x"}]}"#, "messages[0]");
    check(r#"{"messages":[{"role":7,"content":"x"}]}"#, "messages[0]");
    check(r#"{"messages":[{"role":"tool","content":null}]}"#, "messages[0]");
    check(
        r#"{"messages":[{"role":"user","content":[{"text":"a"}]}]}"#,
        "messages[0]",
    );
    check(r#"{"messages":[{"role":"user","content":["a"]}]}"#, "messages[0]");
    check(r#"{"messages":[{"role":"user","content":"a"}],"tools":[1]}"#, "tools");
    check(
        r#"{"messages":[{"role":"user","content":"a"}],"add_generation_prompt":1}"#,
        "add_generation_prompt",
    );
    check("{}", "messages");
    check(r#"{"messages":"hi"}"#, "messages");
    check(r#"{"messages":[1]}"#, "messages[0]");
    check(
        r#"{"messages":[{"role":"user","content":"a"},{"content":"x"}]}"#,
        "messages[1]",
    );
    check(r#"{"messages":[{"role":"user"}]}"#, "messages[0]");
    check(r#"{"messages":[{"role":"user","content":7}]}"#, "messages[0]");
    check(
        r#"{"messages":[{"role":"user","content":"x"}],"top_logprobs":2}"#,
        "top_logprobs",
    );
    let image = chat(r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]}"#);
    let image = image
        .expect("a router passes images on")
        .messages
        .remove(0)
        .content
        .expect("parts");
    assert!(image.text().expect_err("no text").message.contains("image_url"));
}
