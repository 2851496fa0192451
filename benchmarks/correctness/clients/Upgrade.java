// Requests an answer as java.net.http does it by default, with `Upgrade: h2c` and a body: `java Upgrade.java URL MODEL`.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.stream.Stream;

class Upgrade {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (boolean streamed : new boolean[] {false, true}) {
            String body = """
                {"model": "%s", "messages": [{"role": "user", "content": "Hello %s"}], "max_tokens": 8, "stream": %b}"""
                .formatted(args[1], "é".repeat(50), streamed);
            HttpRequest request = HttpRequest.newBuilder(URI.create(args[0] + "/chat/completions"))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(body))
                .build();
            HttpResponse<Stream<String>> answer = client.send(request, HttpResponse.BodyHandlers.ofLines());
            String text = String.join("\n", answer.body().toList());
            check(answer.statusCode() == 200 && answer.version() == HttpClient.Version.HTTP_1_1, text);
            check(text.contains(streamed ? "data: [DONE]" : "\"finish_reason\":"), text);
        }
    }

    private static void check(boolean holds, String text) {
        if (!holds) {
            throw new AssertionError(text);
        }
    }
}
