// Quire from Go: example ADDRESS SERVICE_CONFIG
//
// Needs the code that protoc-gen-go and protoc-gen-go-grpc make of inference.proto, here in a module named quire:
//
//	go mod init quire
//	protoc -I protos --go_out=. --go_opt=module=quire --go-grpc_out=. --go-grpc_opt=module=quire \
//	    quire/inference/v1/inference.proto
//	go mod tidy
//
// Versions of grpc-go before 1.40 retry only with GRPC_GO_RETRY=on in the environment.
package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	api "quire/inference/v1"
)

func main() {
	config, err := os.ReadFile(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	channel, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithDefaultServiceConfig(string(config)))
	if err != nil {
		log.Fatal(err)
	}
	defer channel.Close()
	service := api.NewInferenceServiceClient(channel)
	for _, part := range []func(api.InferenceServiceClient) error{generate, stream, fail, resume} {
		if err := part(service); err != nil {
			log.Fatal(err)
		}
	}
}

// A request for at most 16 tokens.
func generation() *api.Generation {
	return &api.Generation{
		Prompt:   &api.Generation_Text{Text: "A quire is"},
		Stopping: &api.Stopping{MaxTokens: proto.Uint32(16)},
	}
}

func withinAMinute() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), time.Minute)
}

// One response with the whole text.
func generate(service api.InferenceServiceClient) error {
	ctx, cancel := withinAMinute()
	defer cancel()
	request := generation()
	request.Sampling = &api.Sampling{Temperature: proto.Float64(0)}
	response, err := service.Generate(ctx, &api.GenerateRequest{Generation: request})
	if err != nil {
		return err
	}
	fmt.Println("generated:", response.Completions[0].Text)
	return nil
}

// Chunks as they come, between the acceptance and the usage.
func stream(service api.InferenceServiceClient) error {
	ctx, cancel := withinAMinute()
	defer cancel()
	messages, err := service.StreamGenerate(ctx, &api.StreamGenerateRequest{Generation: generation()})
	if err != nil {
		return err
	}
	text, err := read(messages.Recv)
	if err != nil {
		return err
	}
	fmt.Println("streamed:", text)
	return nil
}

// The text of all chunks up to the end of a stream. A message without a chunk has none.
func read[Message interface{ GetChunk() *api.Chunk }](receive func() (Message, error)) (string, error) {
	text := ""
	for {
		message, err := receive()
		if err == io.EOF {
			return text, nil
		}
		if err != nil {
			return "", err
		}
		text += message.GetChunk().GetText()
	}
}

// An error: its code, its reason, and the field at fault.
func fail(service api.InferenceServiceClient) error {
	ctx, cancel := withinAMinute()
	defer cancel()
	request := generation()
	request.Sampling = &api.Sampling{Temperature: proto.Float64(9)}
	_, err := service.Generate(ctx, &api.GenerateRequest{Generation: request})
	reason, field := "", ""
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = detail.Reason
		case *errdetails.BadRequest:
			field = detail.FieldViolations[0].Field
		}
	}
	fmt.Println("error:", code.Code(status.Code(err)), reason, field)
	return nil
}

// A stream that breaks, and its rest: a request with a name can be resumed, on any gateway.
func resume(service api.InferenceServiceClient) error {
	name := make([]byte, 16)
	if _, err := rand.Read(name); err != nil {
		return err
	}
	requestID := fmt.Sprintf("example-%x", name)
	chunk, err := firstChunk(service, requestID)
	if err != nil {
		return err
	}
	ctx, cancel := withinAMinute()
	defer cancel()
	position := &api.Position{NextOffset: chunk.Offset + uint64(len(chunk.TokenIds))}
	messages, err := service.Resume(ctx, &api.ResumeRequest{RequestId: requestID, Positions: []*api.Position{position}})
	if err != nil {
		return err
	}
	rest, err := read(messages.Recv)
	if err != nil {
		return err
	}
	fmt.Printf("resumed: %s|%s\n", chunk.Text, rest)
	return nil
}

// The first chunk of a stream, which is then cancelled.
func firstChunk(service api.InferenceServiceClient, requestID string) (*api.Chunk, error) {
	ctx, cancel := withinAMinute()
	defer cancel()
	request := generation()
	request.RequestId = proto.String(requestID)
	messages, err := service.StreamGenerate(ctx, &api.StreamGenerateRequest{Generation: request})
	if err != nil {
		return nil, err
	}
	for {
		message, err := messages.Recv()
		if err != nil || message.GetChunk() != nil {
			return message.GetChunk(), err
		}
	}
}
