// Quire from C++: example ADDRESS SERVICE_CONFIG
//
// Needs gRPC and protobuf (Debian: libgrpc++-dev, protobuf-compiler-grpc), and the code that protoc generates with
// --cpp_out and --grpc_out from inference.proto, google/rpc/status.proto and google/rpc/error_details.proto.

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <memory>
#include <random>
#include <sstream>
#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "quire/inference/v1/inference.grpc.pb.h"

namespace api = quire::inference::v1;
using Stub = api::InferenceService::Stub;

namespace {

std::unique_ptr<grpc::ClientContext> within_a_minute() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
  return context;
}

// A request for at most 16 tokens.
api::Generation generation() {
  api::Generation generation;
  generation.set_text("A quire is");
  generation.mutable_stopping()->set_max_tokens(16);
  return generation;
}

// One response with the whole text.
grpc::Status generate(Stub& stub, double temperature, api::GenerateResponse* response) {
  api::GenerateRequest request;
  *request.mutable_generation() = generation();
  request.mutable_generation()->mutable_sampling()->set_temperature(temperature);
  return stub.Generate(within_a_minute().get(), request, response);
}

// Chunks as they come, between the acceptance and the usage.
void stream(Stub& stub) {
  api::StreamGenerateRequest request;
  *request.mutable_generation() = generation();
  auto context = within_a_minute();
  auto reader = stub.StreamGenerate(context.get(), request);
  std::string text;
  for (api::StreamGenerateResponse message; reader->Read(&message);) text += message.chunk().text();
  if (grpc::Status status = reader->Finish(); !status.ok()) throw std::runtime_error(status.error_message());
  std::cout << "streamed: " << text << std::endl;
}

// An error: its code, its reason, and the field at fault.
void fail(Stub& stub) {
  api::GenerateResponse response;
  const grpc::Status status = generate(stub, 9, &response);
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad_request;
  for (const auto& detail : details.details()) {
    if (!detail.UnpackTo(&info)) detail.UnpackTo(&bad_request);
  }
  const bool is_invalid = status.error_code() == grpc::StatusCode::INVALID_ARGUMENT;
  std::cout << "error: " << (is_invalid ? "INVALID_ARGUMENT" : "another code") << " " << info.reason() << " "
            << bad_request.field_violations(0).field() << std::endl;
}

// A stream that breaks, and its rest: a request with a name can be resumed, on any gateway.
void resume(Stub& stub) {
  std::random_device random;
  const std::string request_id = "example-" + std::to_string(random()) + "-" + std::to_string(random());
  api::StreamGenerateRequest request;
  *request.mutable_generation() = generation();
  request.mutable_generation()->set_request_id(request_id);
  auto context = within_a_minute();
  auto reader = stub.StreamGenerate(context.get(), request);
  api::StreamGenerateResponse message;
  while (reader->Read(&message) && !message.has_chunk()) {
  }
  context->TryCancel();
  reader->Finish();

  api::ResumeRequest position;
  position.set_request_id(request_id);
  position.add_positions()->set_next_offset(message.chunk().offset() + message.chunk().token_ids_size());
  auto second = within_a_minute();
  auto rest = stub.Resume(second.get(), position);
  std::string text;
  for (api::ResumeResponse more; rest->Read(&more);) text += more.chunk().text();
  if (grpc::Status status = rest->Finish(); !status.ok()) throw std::runtime_error(status.error_message());
  std::cout << "resumed: " << message.chunk().text() << "|" << text << std::endl;
}

}  // namespace

int main(int, char** arguments) {
  std::stringstream config;
  config << std::ifstream(arguments[2]).rdbuf();
  grpc::ChannelArguments options;
  options.SetServiceConfigJSON(config.str());
  auto channel = grpc::CreateCustomChannel(arguments[1], grpc::InsecureChannelCredentials(), options);
  auto stub = api::InferenceService::NewStub(channel);
  api::GenerateResponse response;
  if (grpc::Status status = generate(*stub, 0, &response); !status.ok()) throw std::runtime_error(status.error_message());
  std::cout << "generated: " << response.completions(0).text() << std::endl;
  stream(*stub);
  fail(*stub);
  resume(*stub);
}
