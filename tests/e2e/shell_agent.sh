# An agent of busybox alone, for a sandbox without anything: the conversation is one string of JSON.

quoted() {
    tr '\t' ' ' | sed 's/\\/\\\\/g; s/"/\\"/g' | awk '{ printf "%s%s", (NR > 1) ? "\\n" : "", $0 }'
}

ask() {
    wget -q -O- --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
        --post-data "{\"model\": \"$RATCHET_MODEL\", \"messages\": [$1]}" "$OPENAI_BASE_URL/chat/completions"
}

messages='{"role": "system", "content": "You use a Linux shell. Reply with one command:\n```bash\nls\n```\nWhen done, reply with:\nAnswer: RESULT"}'
next=$(printf '%s' "$RATCHET_INSTRUCTION" | quoted)
while true; do
    messages="$messages, {\"role\": \"user\", \"content\": \"$next\"}"
    answer=$(ask "$messages") || exit 0
    text=$(printf '%s' "$answer" | sed -E 's/.*"content": "(([^"\\]|\\.)*)".*/\1/')
    messages="$messages, {\"role\": \"assistant\", \"content\": \"$text\"}"
    plain=$(printf '%b' "$(printf '%s' "$text" | sed 's/\\"/"/g')")
    case "$plain" in *'Answer: '*) exit 0 ;; esac
    command=$(printf '%s\n' "$plain" | sed -n '/^```bash$/,/^```$/p' | sed '/^```/d')
    if [ -z "$command" ]; then
        next='Not understood: no action. Reply with one ```bash block, or with Answer:'
        continue
    fi
    output=$(timeout 5 sh -c "$command" 2>&1 </dev/null)
    code=$?
    [ "$code" = 0 ] || output="$output${output:+
}(exit $code)"
    next=$(printf '%s' "${output:-(no output)}" | quoted)
done
